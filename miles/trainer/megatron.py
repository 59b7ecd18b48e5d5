"""`MegatronTrainer`: the driver's side of a group of Megatron-core ranks; implements `miles.trainer.protocol.Trainer`.

    call -> rank group -> results        a rank dies or hangs -> kill the group -> start another -> last checkpoint
                                         -> train the logged batches again -> the call that failed, again

Invariant: an update whose call returned is in the weights exactly once, however often ranks were lost. One call at a
time reaches the ranks. They are killed when the block is left. Never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import anyio
import structlog

from controllers.errors import ActorDied, InfrastructureError, MilesError, WaitTimeout
from controllers.events import Event, TrainerLost, TrainerRebuilt
from executors.trajectory import Batch
from miles.batch_log import BATCHES_FOLDER, BatchLog
from miles.cluster.actors import RemoteActor, start_actor
from miles.trainer.bad_steps import BadSteps
from miles.trainer.faults import FaultOptions
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, RankContext, StepStats
from miles.trainer.rank_group import RankGroup
from miles.trainer.standing import Standing

P = ParamSpec("P")
R = TypeVar("R")

log = structlog.get_logger(__name__)

SAVE_MARGIN_S = 20.0
"""How much longer than the ranks themselves the driver waits for a checkpoint: theirs is the better error."""


class MegatronTrainer:
    """Use as `async with MegatronTrainer(options) as trainer`; Ray must be running.

    A call that loses the ranks waits for new ones and is made again, all but `on_each_rank`. Once `faults.rebuilds`
    groups have been lost, every call raises ActorDied. A call raises what the ranks raise.
    """

    def __init__(
        self,
        options: TrainerOptions,
        *,
        faults: FaultOptions | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        name: str = "trainer",
        start: Callable[..., RemoteActor] = start_actor,
    ) -> None:
        self._options = replace(options, model_path=_absolute(options.model_path))
        self._faults = faults or FaultOptions()
        self._on_event = on_event
        self._name = name
        self._start = start
        folder = self._faults.folder
        batches = None if folder is None else BatchLog(folder / BATCHES_FOLDER, keep=self._faults.keep_batches)
        self._standing = Standing(batches)
        self._bad_steps = BadSteps(self._faults)
        self._group: RankGroup | None = None
        self._failure: Exception | None = None
        self._news = anyio.Event()
        self._turn = anyio.Lock()
        self._incarnation = 1
        self._last_loss: MilesError | None = None
        self._rebuilds = 0
        self._steps_done = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._close)
            self._group = group = self._new_group()
            await group.open(self._options.start_timeout_s)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(self._keep_alive)
            self._stack = stack.pop_all()
        log.info("trainer_started", ranks=len(group), model=str(self._options.model_path))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The body's own error leaves as it is: a task group would wrap what it is told of into a group.
        await self._stack.aclose()

    @property
    def steps_done(self) -> int:
        """Optimizer steps of reinforcement learning done so far."""
        return self._steps_done

    @property
    def incarnation(self) -> int:
        """Which group of ranks this is, from 1; rises at the moment one is lost, before its calls raise."""
        return self._incarnation

    @property
    def rebuilds(self) -> int:
        """How often new ranks have taken the place of lost ones."""
        return self._rebuilds

    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step on a batch of groups. Raises BadStep as `faults.bad_steps` says."""
        async with self._turn:
            await self._standing.about_to_step(batch)
            stats: StepStats = (await self._on_ranks("step", batch))[0]
            self._standing.stepped(stats.step)
            self._steps_done = stats.step
        await self._bad_steps.look(batch, stats)
        return stats

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step at learning rate `lr`."""
        async with self._turn:
            stats: StepStats = (await self._on_ranks("warmup_step", list(examples), lr))[0]
            self._standing.warmed_up(list(examples), lr)
        return stats

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The trainer's logprob of each response token, temperature applied."""
        async with self._turn:
            values: list[list[float]] = (await self._on_ranks("logprobs", list(sequences)))[0]
        return values

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in every rank's process; results in rank order.

        Raises ActorDied or WaitTimeout when ranks are lost meanwhile: new ones lack what plugins kept in them.
        """
        async with self._turn:
            return await self._on_ranks("run_function", function, args, kwargs, again=False)

    async def save(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint that is whole or absent; calls `on_copied` once other calls may be made.

        Raises ConfigError when something else lies there, CheckpointFailed when it cannot be written, ActorDied when
        ranks are lost while they write it and training has gone on meanwhile.
        """
        target = _absolute(folder)
        while True:
            async with self._turn:
                group, _ = await self._called("begin_save", target)
                self._standing.saving(target)
                updates = self._standing.updates
            on_copied()
            try:
                await group.call("finish_save", timeout_s=self._options.call_timeout_s + SAVE_MARGIN_S, beside=True)
            except (InfrastructureError, WaitTimeout) as error:
                if error is not group.loss or self._standing.updates != updates:
                    raise
            else:
                await self._standing.confirm()
                return

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        async with self._turn:
            self._steps_done = (await self._on_ranks("load", _absolute(folder)))[0]
            self._standing.loaded(_absolute(folder), self._steps_done)

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format. Raises ConfigError when `folder` is not empty."""
        async with self._turn:
            await self._on_ranks("export", _absolute(folder))

    async def _on_ranks(self, method: str, *args: Any, again: bool = True) -> list[Any]:
        """Call a method on every rank, in one's turn; results in rank order. Made `again` on new ranks."""
        _, results = await self._called(method, *args, again=again)
        return results

    async def _called(self, method: str, *args: Any, again: bool = True) -> tuple[RankGroup, list[Any]]:
        """The same, and the group that answered."""
        while True:
            group = await self._working_group()
            try:
                return group, await group.call(method, *args, timeout_s=self._options.call_timeout_s)
            except (InfrastructureError, WaitTimeout) as error:
                if error is not group.loss or not again:
                    raise

    async def _working_group(self) -> RankGroup:
        """The group of ranks, once there is one that is not lost."""
        while self._failure is None:
            if self._group is not None and self._group.loss is None:
                return self._group
            await self._news.wait()
        raise self._failure

    async def _keep_alive(self) -> None:
        """Wait for the loss of a group, also between calls, and put another in its place; or have every call fail."""
        try:
            while True:
                assert self._group is not None
                await self._group.watch()
                while self._group is None or self._group.loss is not None:
                    self._group = await self._rebuilt_group()
                self._tell()
        except Exception as error:  # noqa: BLE001 - the supervised boundary: raised by every call from now on
            log.error("trainer_failed", error=str(error))
            self._failure = error
            self._tell()

    async def _rebuilt_group(self) -> RankGroup | None:
        """New ranks that stand where the lost ones did; None when they were lost in turn."""
        if self._rebuilds >= self._faults.rebuilds:
            raise ActorDied(
                f"the trainer lost its ranks after {self._rebuilds} rebuilds (trainer.rebuilds): {self._last_loss}",
                actor=self._name,
            )
        self._rebuilds += 1
        began = time.monotonic()
        group = self._new_group()
        try:
            await group.open(self._options.start_timeout_s)
            replayed = await self._standing.restore(group, self._options.call_timeout_s)
        except (InfrastructureError, WaitTimeout) as error:
            group.end()
            if error is not group.loss:
                raise
            return None
        except BaseException:
            group.end()
            raise
        event = TrainerRebuilt(self._incarnation, self._steps_done, replayed, round(time.monotonic() - began, 3))
        log.warning("trainer_rebuilt", step=event.step, replayed=replayed, seconds=event.rebuild_s)
        self._on_event(event)
        return group

    def _new_group(self) -> RankGroup:
        return RankGroup.start(self._options, f"{self._name}.{self._incarnation}", self._start, self._lost)

    def _lost(self, reason: MilesError) -> None:
        """Called once by a group that is lost, before anybody who waits for it goes on."""
        event = TrainerLost(self._incarnation, self._steps_done, str(reason).partition("\n")[0])
        log.warning("trainer_lost", incarnation=event.incarnation, step=event.step, reason=event.reason)
        self._on_event(event)
        self._last_loss = reason
        self._incarnation += 1

    def _tell(self) -> None:
        """Wake the calls that wait for a group."""
        self._news.set()
        self._news = anyio.Event()

    def _close(self) -> None:
        if self._group is not None:
            self._group.end()
        self._failure = self._failure or ActorDied("the trainer has been left", actor=self._name)
        self._tell()


def _absolute(path: Path) -> Path:
    """The same path in a rank, whose working folder is another."""
    return path.absolute()
