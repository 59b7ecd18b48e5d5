"""The loops of `miles train`, one for each kind of run, and how its exit code comes about.

`train` is the whole of training; a person can write the same with the Python API.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable

import anyio

from controllers.errors import ConfigError
from miles.cluster.signals import StopSignals
from miles.config import RunConfig
from miles.failure import describe_failure, root_cause
from miles.replay_run import ReplayRun, open_replay
from miles.rollout_run import RolloutRun, open_rollouts
from miles.run import Run, open_run
from miles.run_opening import Kind, kind_of

EXIT_DONE, EXIT_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130


async def train(run: Run) -> None:
    """Train for `train.steps` optimizer steps, evaluating, restarting engines and saving as configured."""
    config = run.config
    if config.eval.every:
        await run.evaluate()
    async for batch in run.batches():
        stats = await run.trainer.step(batch)
        await run.publish_weights()
        if stats.step == config.inference.rolling_restart_at_step:
            run.start_soon(run.inference.rolling_restart)
        if _is_due(stats.step, config.eval.every, config.train.steps):
            await run.evaluate()
        if _is_due(stats.step, config.checkpoint.every, config.train.steps):
            await run.save_checkpoint()


async def replay(run: ReplayRun) -> None:
    """Train on the batches that an earlier run kept."""
    batches = run.batches()
    async for batch in batches:
        stats = await run.trainer.step(batch)
        if _is_due(stats.step, run.config.checkpoint.every, batches.last_step):
            await run.save_checkpoint()


async def collect(run: RolloutRun) -> None:
    """Make and keep `train.steps` batches."""
    async for batch in run.batches():
        await run.keep(batch)


def run_training(config: RunConfig) -> int:
    """Run `train` to its end, a failure or a signal; return the exit code of `miles train`."""
    try:
        return anyio.run(_train_until_stopped, config)
    except Exception as error:  # noqa: BLE001 - the last boundary: recorded in summary.json and log.jsonl, shown here
        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(root_cause(error), ConfigError) else EXIT_FAILED


async def _train_until_stopped(config: RunConfig) -> int:
    with anyio.CancelScope() as scope:
        async with StopSignals(lambda received: scope.cancel()):
            await _LOOPS[kind_of(config)](config)
    return EXIT_INTERRUPTED if scope.cancelled_caught else EXIT_DONE


async def _run(config: RunConfig) -> None:
    async with open_run(config) as run:
        _started()
        await train(run)


async def _replay(config: RunConfig) -> None:
    async with open_replay(config) as run:
        _started()
        await replay(run)


async def _rollouts(config: RunConfig) -> None:
    async with open_rollouts(config) as run:
        _started()
        await collect(run)


_LOOPS: dict[Kind, Callable[[RunConfig], Awaitable[None]]] = {"run": _run, "replay": _replay, "rollout": _rollouts}


def _started() -> None:
    """What start-up made lives to the end: scanned again at every full collection, it would hold up the loop."""
    gc.freeze()


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)
