"""What a run needs of its data, as Protocols, and the cursor that every source of ours shares.

Invariant: what stands at a position depends on the source's settings and seed alone, so that a resumed run starts at
its position and goes on with the prompts it would have had. The held-out prompts appear in none of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from controllers.errors import ConfigError
from executors.ports import PromptSource
from executors.trajectory import Prompt

TokenPair = tuple[tuple[int, ...], tuple[int, ...]]
"""A supervised example: the ids of its prompt and of its completion, end of sequence included."""


class TextEncoder(Protocol):
    """The part of a tokenizer that data needs."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, the one to write first."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text; nothing is added at either end."""


class DataSource(Protocol):
    """A task: prompts to train on, prompts held out for evaluation, and worked examples for the warm-up."""

    def train(self, *, start: int = 0) -> PromptSource:
        """The training prompts from position `start` on."""

    def evaluation(self, count: int) -> list[Prompt]:
        """`count` held-out prompts, each once, always the same ones; fewer where there are fewer."""

    def warmup_examples(self, count: int, step: int, *, max_tokens: int | None = None) -> list[TokenPair]:
        """`count` supervised examples for warm-up step `step`, none held out.

        Those of more than `max_tokens` tokens are passed over; there are fewer examples where too many are.
        """


class PromptCursor:
    """A PromptSource over a function from positions to prompts, which answers None past the end.

    `position` is the index of the prompt that `next` gives next. Raises ValueError for a start below 0.
    """

    def __init__(self, prompt_at: Callable[[int], Prompt | None], *, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"a position is at least 0, not {start}")
        self._prompt_at = prompt_at
        self._position = start

    @property
    def position(self) -> int:
        return self._position

    def next(self) -> Prompt | None:
        prompt = self._prompt_at(self._position)
        if prompt is not None:
            self._position += 1
        return prompt


def completion_ids(encoder: TextEncoder, label: str) -> tuple[int, ...]:
    """Ids of a label, closed by the end-of-sequence token. Raises ConfigError where the model has none."""
    if not encoder.eos_ids:
        raise ConfigError("train.warmup: the model names no eos_token_id, so an example cannot be ended", key="model")
    return (*encoder.encode(label), encoder.eos_ids[0])
