"""A replay: a trainer alone, on the batches that an earlier run kept (`debug.dump_batches`, `debug.rollout_only`).

    async with open_replay("run.yaml", {"debug.replay": "runs/first/batches", "run.dir": "runs/again"}) as run:
        async for batch in run.batches():
            await run.trainer.step(batch)

It begins as the run did, with the same model and warm-up, so with the same configuration on CPU every step comes out
as it did then. No engine is started and no weights are published.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from executors.trajectory import Batch
from miles.assembly import TrainingParts, assemble_training
from miles.batch_log import BatchLog, logged_steps
from miles.checkpoints import FOLDER, Checkpoints, KeepRule
from miles.config import RunConfig
from miles.recorder import RunRecorder
from miles.run_opening import Overrides, recorded
from miles.run_trainer import RunTrainer
from miles.trainer.protocol import StepStats
from miles.warmup import warm_up


class LoggedBatches:
    """The batches of a folder in the order of their steps, up to `last_step`: an iterator object."""

    def __init__(self, folder: Path, last_step: int) -> None:
        steps = [step for step in logged_steps(folder) if step <= last_step]
        self.last_step = max(steps, default=0)
        """The step of the last one."""
        self._log = BatchLog(folder, keep=True)
        self._steps = iter(steps)

    def __aiter__(self) -> LoggedBatches:
        return self

    async def __anext__(self) -> Batch:
        """Raises ConfigError for a file that holds no batch."""
        for step in self._steps:
            return await self._log.read(step)
        raise StopAsyncIteration


class ReplayRun:
    """One replay, in progress. Made by `open_replay`."""

    def __init__(self, config: RunConfig, source: Path, parts: TrainingParts, recorder: RunRecorder) -> None:
        self.config = config
        self.folder: Path = recorder.path
        self.trainer = RunTrainer(parts.trainer, self._trained)
        """The trainer; its `step` also writes the metrics."""
        self._material = parts.material
        self._recorder = recorder
        rule = KeepRule(config.checkpoint.keep, config.checkpoint.keep_every)
        self._checkpoints = Checkpoints(recorder.path / FOLDER, rule)
        self._batches = LoggedBatches(source, config.train.steps)

    def batches(self) -> LoggedBatches:
        """The kept batches, until they are used up or `train.steps` steps are done."""
        return self._batches

    async def save_checkpoint(self) -> Path:
        """Save weights, optimizer, schedule and random state of this step."""
        return await self._checkpoints.save(self.trainer, self.trainer.steps_done)

    async def _begin(self) -> None:
        await warm_up(self.trainer, self.config.train.warmup, self._material, self._recorder.stage)
        self._recorder.stage("training on kept batches")
        self._recorder.start_clock()

    def _trained(self, batch: Batch, stats: StepStats, train_s: float) -> None:
        self._recorder.step_done(batch, stats, {"train_call_s": train_s})


@asynccontextmanager
async def open_replay(config: RunConfig | str | Path, overrides: Overrides = ()) -> AsyncIterator[ReplayRun]:
    """Open a replay of the batches in `debug.replay`; configurations are given as to `miles.open_run`.

    Raises ConfigError for a bad configuration or a run folder that is in use, before anything is started.
    """
    async with (
        recorded(config, overrides, "replay") as (resolved, recorder),
        assemble_training(resolved, recorder) as parts,
    ):
        assert resolved.debug.replay is not None
        run = ReplayRun(resolved, resolved.debug.replay, parts, recorder)
        await run._begin()
        yield run
