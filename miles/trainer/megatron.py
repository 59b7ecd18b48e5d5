"""`MegatronTrainer`: the driver's side of a group of Megatron-core ranks; implements `miles.trainer.protocol.Trainer`.

Its ranks live from `__aenter__` to `__aexit__`, which kills them. One call at a time reaches them, so collectives
start in the same order everywhere and a call's deadline does not include the call before it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
import structlog

from executors.trajectory import Batch
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, RankContext, StepStats
from miles.trainer.rank import TrainerRank

P = ParamSpec("P")
R = TypeVar("R")

log = structlog.get_logger(__name__)


class MegatronTrainer:
    """Use as `async with MegatronTrainer(options) as trainer`; Ray must be running.

    Every call raises ActorDied when a rank is gone, WaitTimeout past its deadline, or what the rank raised. After
    either of the first two the ranks' state is unknown: leave the trainer and resume from a checkpoint.
    """

    def __init__(
        self, options: TrainerOptions, *, name: str = "trainer", start: Callable[..., RemoteActor] = start_actor
    ) -> None:
        self._options = replace(options, model_path=_absolute(options.model_path))
        self._name = name
        self._start = start
        self._ranks: list[RemoteActor] = []
        self._turn = anyio.Lock()
        self._steps_done = 0

    async def __aenter__(self) -> Self:
        try:
            for rank in range(self._options.world_size):
                placement = ActorOptions(f"{self._name}-{rank}")
                self._ranks.append(self._start(TrainerRank, self._options, rank, options=placement))
            await self._all("open", timeout_s=self._options.start_timeout_s)
        except BaseException:
            self._kill()
            raise
        log.info("trainer_started", ranks=len(self._ranks), model=str(self._options.model_path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    @property
    def steps_done(self) -> int:
        """Optimizer steps of reinforcement learning done so far."""
        return self._steps_done

    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step on a batch of groups."""
        stats: StepStats = (await self._all("step", batch))[0]
        self._steps_done = stats.step
        return stats

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step at learning rate `lr`."""
        stats: StepStats = (await self._all("warmup_step", list(examples), lr))[0]
        return stats

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The trainer's logprob of each response token, temperature applied."""
        values: list[list[float]] = (await self._all("logprobs", list(sequences)))[0]
        return values

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in every rank's process; results in rank order."""
        return await self._all("run_function", function, args, kwargs)

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that is whole or absent. Raises ConfigError when something else lies there."""
        await self._all("save", _absolute(folder))

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._steps_done = (await self._all("load", _absolute(folder)))[0]

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format. Raises ConfigError when `folder` is not empty."""
        await self._all("export", _absolute(folder))

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every rank at once; results in rank order, or the first error."""
        deadline_s = timeout_s or self._options.call_timeout_s
        results: list[Any] = [None] * len(self._ranks)
        first_error: Exception | None = None

        async def call(index: int, actor: RemoteActor, scope: anyio.CancelScope) -> None:
            nonlocal first_error
            try:
                results[index] = await actor.call(method, *args, timeout_s=deadline_s)
            except Exception as error:  # noqa: BLE001 - kept and raised below: the others would wait for a dead peer
                first_error = first_error or error
                scope.cancel()

        async with self._turn, anyio.create_task_group() as calls:
            for index, actor in enumerate(self._ranks):
                calls.start_soon(call, index, actor, calls.cancel_scope)
        if first_error is not None:
            raise first_error
        return results

    def _kill(self) -> None:
        for actor in self._ranks:
            actor.kill()
        self._ranks.clear()


def _absolute(path: Path) -> Path:
    """The same path in a rank, whose working folder is another."""
    return path.absolute()
