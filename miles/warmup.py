"""The supervised stage before the first rollout: it teaches the form of an answer, so that some rewards come."""

from __future__ import annotations

from collections.abc import Callable

from miles.assembly import Material
from miles.config.learning import WarmupConfig
from miles.trainer.protocol import Example, Trainer

_SHOWN_EVERY = 10


async def warm_up(trainer: Trainer, config: WarmupConfig, material: Material, stage: Callable[[str], None]) -> None:
    """Do `config.steps` supervised steps on examples of the data source; `stage` hears how far it is."""
    longest = material.model.context_length
    for index in range(config.steps):
        pairs = material.data.warmup_examples(config.examples_per_step, index, max_tokens=longest)
        await trainer.warmup_step([Example(prompt, completion) for prompt, completion in pairs], config.lr)
        if (index + 1) % _SHOWN_EVERY == 0 or index + 1 == config.steps:
            stage(f"warm-up {index + 1}/{config.steps}")
