"""The training loop of `miles train`, and how its exit code comes about.

`train` is the whole loop; a person can write the same with the Python API.
"""

from __future__ import annotations

import gc
import sys

import anyio

from controllers.errors import ConfigError
from miles.cluster.signals import StopSignals
from miles.config import RunConfig
from miles.failure import describe_failure, root_cause
from miles.run import Run, open_run

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


def run_training(config: RunConfig) -> int:
    """Run `train` to its end, a failure or a signal; return the exit code of `miles train`."""
    try:
        return anyio.run(_train_until_stopped, config)
    except Exception as error:  # noqa: BLE001 - the last boundary: recorded in summary.json and log.jsonl, shown here
        print(f"error: {describe_failure(error)}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(root_cause(error), ConfigError) else EXIT_FAILED


async def _train_until_stopped(config: RunConfig) -> int:
    with anyio.CancelScope() as scope:
        async with StopSignals(lambda received: scope.cancel()), open_run(config) as run:
            # What start-up made lives to the end: scanned again at every full collection, it would hold up the loop.
            gc.freeze()
            await train(run)
    return EXIT_INTERRUPTED if scope.cancelled_caught else EXIT_DONE


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)
