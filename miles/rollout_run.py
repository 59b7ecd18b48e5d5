"""Rollouts without a trainer: engines serve the weights of the model's folder, and scored batches are kept.

    async with open_rollouts("run.yaml", {"debug.rollout_only": True}) as run:
        async for batch in run.batches():
            await run.keep(batch)

The folder's weights are published once, as version 1, and every engine proves them as it would a trainer's. For a look
at rewards before training, for data, and for a replay: batch k is then what a trainer would see whose engines never
got new weights, so its staleness is k - 1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from executors.trajectory import Batch
from miles.assembly import RolloutParts, assemble_rollouts
from miles.batch_log import BATCHES_FOLDER, BatchLog
from miles.config import RunConfig
from miles.part_options import algorithm_options
from miles.recorder import RunRecorder
from miles.run_batches import RunBatches
from miles.run_opening import FIRST_LINEAGE, Overrides, recorded, start_timeout_s
from miles.trainer.protocol import StepStats
from miles.trainer.rl_batch import prepare


class RolloutRun:
    """Rollouts in progress. Made by `open_rollouts`."""

    def __init__(self, config: RunConfig, parts: RolloutParts, recorder: RunRecorder) -> None:
        self.config = config
        self.folder: Path = recorder.path
        self.inference = parts.rollouts.inference
        """The fleet."""
        self.executor = parts.rollouts.executor
        """The rollouts."""
        self._weight_sync = parts.rollouts.weight_sync
        self._recorder = recorder
        self._log = BatchLog(recorder.path / BATCHES_FOLDER, keep=True)
        self._kept = 0
        # A KL penalty needs a reference model; what is reported here does not.
        self._algorithm = replace(algorithm_options(config), kl=None)
        stream = self.executor.batches(parts.material.data.train())
        self._batches = RunBatches(stream, config.train.steps, lambda: self._kept)

    def batches(self) -> RunBatches:
        """Batches as groups finish, until `train.steps` of them are kept."""
        return self._batches

    async def keep(self, batch: Batch) -> Path:
        """Write a batch into the run folder and its rewards into the metrics. Its groups stay `buffered`."""
        file = await self._log.add(batch)
        self._kept += 1
        metrics = prepare(batch, self._algorithm).metrics
        self._recorder.step_done(batch, StepStats(batch.step, metrics), {"wait_s": self._batches.wait_s})
        return file

    async def _begin(self) -> None:
        version = await self._weight_sync.publish(0, FIRST_LINEAGE)
        self._recorder.stage("waiting for the engines to serve the model's weights")
        await self.inference.wait_serving(version=version.number, timeout_s=start_timeout_s(self.config))
        self._recorder.stage("generating")
        self._recorder.start_clock()


@asynccontextmanager
async def open_rollouts(config: RunConfig | str | Path, overrides: Overrides = ()) -> AsyncIterator[RolloutRun]:
    """Open a run that only generates; configurations are given as to `miles.open_run`.

    Raises ConfigError for a bad configuration or a run folder that is in use, before anything is started.
    """
    async with (
        recorded(config, overrides, "rollout") as (resolved, recorder),
        assemble_rollouts(resolved, recorder) as parts,
    ):
        run = RolloutRun(resolved, parts, recorder)
        await run._begin()
        yield run
