"""The trainer as a run shows it: any Trainer, with each trained batch entered in the account and the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from executors.trajectory import Batch
from miles.batch_log import BatchLog
from miles.trainer.protocol import Example, RankContext, StepStats, Trainer

P = ParamSpec("P")
R = TypeVar("R")


class RunTrainer:
    """Implements `miles.trainer.protocol.Trainer` on top of another one."""

    def __init__(
        self,
        trainer: Trainer,
        on_trained: Callable[[Batch, StepStats, float], None],
        dump: BatchLog | None = None,
    ) -> None:
        """`on_trained(batch, stats, seconds)` is called after every step that succeeded, before `step` returns.

        `dump` gets every batch before its step, so that one which fails is there too.
        """
        self._trainer = trainer
        self._on_trained = on_trained
        self._dump = dump

    @property
    def steps_done(self) -> int:
        """Optimizer steps of reinforcement learning done so far."""
        return self._trainer.steps_done

    @property
    def incarnation(self) -> int:
        """Rises when the ranks' processes are replaced."""
        return self._trainer.incarnation

    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step. The batch's groups count as trained once it has succeeded."""
        if self._dump is not None:
            await self._dump.add(batch)
        began = time.monotonic()
        stats = await self._trainer.step(batch)
        self._on_trained(batch, stats, time.monotonic() - began)
        return stats

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step."""
        return await self._trainer.warmup_step(examples, lr)

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The trainer's logprobs of responses."""
        return await self._trainer.logprobs(sequences)

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in every rank's process."""
        return await self._trainer.on_each_rank(function, *args, **kwargs)

    async def save(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint; training may go on once `on_copied` is called."""
        await self._trainer.save(folder, on_copied)

    async def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        await self._trainer.load(folder)

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format."""
        await self._trainer.export(folder)
