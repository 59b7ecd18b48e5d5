"""A run: the object a research loop holds. Everything in it is owned by the `async with` block of `open_run`.

    async with miles.open_run("configs/quickstart.yaml") as run:
        async for batch in run.batches():
            stats = await run.trainer.step(batch)
            await run.publish_weights()

Entering starts engines and trainer, runs the supervised warm-up, saves checkpoint 0 and publishes version 1.
Leaving, in whatever way, ends every process and writes `summary.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import anyio
from anyio.abc import TaskGroup

from controllers.errors import MilesError
from controllers.inference_controller import InferenceController
from controllers.weight_versions import WeightVersion
from executors.rollout_executor import RolloutExecutor
from executors.sampling_client import SamplingParams
from executors.trajectory import Batch
from miles.assembly import Parts, assemble
from miles.checkpoints import FOLDER, Checkpoints, KeepRule
from miles.config import RunConfig
from miles.recorder import RunRecorder
from miles.run_batches import RunBatches
from miles.run_opening import FIRST_LINEAGE, Overrides, recorded, start_timeout_s
from miles.run_trainer import RunTrainer
from miles.trainer.protocol import StepStats
from miles.version_steps import AVAILABLE_STATES
from miles.warmup import warm_up

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A greedy pass over held-out prompts. `reward` is the mean over the `scored` ones; None where none could be."""

    step: int
    weight_version: int
    reward: float | None
    prompts: int
    scored: int


class Run:
    """One run, in progress. Made by `open_run`."""

    def __init__(self, config: RunConfig, parts: Parts, recorder: RunRecorder, tasks: TaskGroup) -> None:
        self.config = config
        self.folder: Path = recorder.path
        self.inference: InferenceController = parts.rollouts.inference
        """The fleet: `rolling_restart()`, `restart(engine)`, `snapshot()`, `lease()`."""
        self.executor: RolloutExecutor = parts.rollouts.executor
        """The rollouts: `account`, `statistics()`, `sample()`."""
        self.trainer = RunTrainer(parts.trainer, self._trained, parts.dump)
        """The trainer; its `step` also enters the batch in the account and the metrics."""
        self._material = parts.material
        self._weight_sync = parts.rollouts.weight_sync
        self._recorder = recorder
        self._tasks = tasks
        rule = KeepRule(config.checkpoint.keep, config.checkpoint.keep_every)
        beside = tasks if config.checkpoint.asynchronous else None
        self._checkpoints = Checkpoints(recorder.path / FOLDER, rule, beside=beside)
        stream = self.executor.batches(self._material.data.train())
        self._batches = RunBatches(stream, config.train.steps, lambda: self.trainer.steps_done)

    def batches(self) -> RunBatches:
        """Batches as groups finish, bounded in staleness, until `train.steps` steps are done."""
        return self._batches

    async def publish_weights(self) -> WeightVersion:
        """Publish the trainer's weights; returns at commit. Engines take them over while they generate."""
        began = time.monotonic()
        version = await self._weight_sync.publish(self.trainer.steps_done, FIRST_LINEAGE)
        sync = self._weight_sync.statistics()
        self._recorder.published(version, time.monotonic() - began, sync.last_sync_s, sync.last_pause_s)
        return version

    async def evaluate(self) -> Evaluation:
        """Answer the held-out prompts greedily with the newest published weights, on engines that serve them."""
        config, began = self.config, time.monotonic()
        version = self.inference.ledger.latest
        if version is None:
            raise MilesError("there is nothing to evaluate before the first publication of weights")
        # Engines that are away come back with these weights or newer ones, so only those in service are waited for.
        in_service = sum(engine.state in AVAILABLE_STATES for engine in self.inference.snapshot())
        await self.inference.wait_serving(
            count=max(1, in_service), version=version.number, timeout_s=start_timeout_s(self.config)
        )
        prompts = self._material.data.evaluation(config.eval.prompts)
        greedy = SamplingParams(
            max_new_tokens=config.rollout.max_tokens, temperature=0.0, stop_token_ids=self._material.tokenizer.eos_ids
        )
        answers = await self.executor.sample(prompts, greedy)
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        reward = statistics.fmean(rewards) if rewards else None
        result = Evaluation(version.step, version.number, reward, len(prompts), len(rewards))
        if reward is not None:
            self._recorder.evaluated(version.step, version.number, reward, len(prompts), time.monotonic() - began)
        return result

    async def save_checkpoint(self) -> Path:
        """Save weights, optimizer, schedule and random state of this step; returns where they are, or soon will be.

        With `checkpoint.asynchronous` training may go on once this returns: a copy is being written. Old checkpoints
        are pruned when it is whole.
        """
        return await self._checkpoints.save(self.trainer, self.trainer.steps_done)

    def start_soon(self, function: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `function(*args)` beside the loop, in the run's task group. Its failure fails the run.

        Leaving the run's block waits for it, as a task group does; an exception or a signal cancels it.
        """

        async def call() -> None:
            await function(*args, **kwargs)

        self._tasks.start_soon(call)

    async def _begin(self) -> None:
        """The stages before the first step."""
        await warm_up(self.trainer, self.config.train.warmup, self._material, self._recorder.stage)
        await self.save_checkpoint()
        version = await self.publish_weights()
        self._recorder.stage("waiting for the engines to serve the first weights")
        await self.inference.wait_serving(version=version.number, timeout_s=start_timeout_s(self.config))
        self._recorder.stage("training")
        self._recorder.start_clock()

    def _trained(self, batch: Batch, stats: StepStats, train_s: float) -> None:
        self.executor.mark_trained(batch)
        seconds = {"wait_s": self._batches.wait_s, "train_call_s": train_s}
        self._recorder.step_done(batch, stats, seconds, publishes=True)


@asynccontextmanager
async def open_run(config: RunConfig | str | Path, overrides: Overrides = ()) -> AsyncIterator[Run]:
    """Open a run from a config, or from a YAML file with `overrides`: `{"train.steps": 50}` or `["train.steps=50"]`.

    Raises ConfigError for a bad configuration or a run folder that is in use, before anything is started.
    """
    async with (
        recorded(config, overrides, "run") as (resolved, recorder),
        assemble(resolved, recorder) as parts,
        anyio.create_task_group() as tasks,
    ):
        run = Run(resolved, parts, recorder, tasks)
        await run._begin()
        yield run
