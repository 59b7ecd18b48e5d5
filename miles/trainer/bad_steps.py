"""Steps whose update was left out because the loss or the gradient was not finite, or too large: counted or fatal.

The ranks leave the update out, so weights and optimizer are as before; this is the driver's half. The batch is kept
in `bad_batches/` as `step-000012.msgpack`, with the step's metrics beside it as JSON.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import anyio.to_thread
import structlog

from executors.trajectory import Batch
from miles.batch_log import batch_file, write_batch
from miles.trainer.faults import BadStep, FaultOptions
from miles.trainer.protocol import StepStats

log = structlog.get_logger(__name__)


class BadSteps:
    """Looks at every step that is done."""

    def __init__(self, options: FaultOptions) -> None:
        self._options = options
        self._in_a_row = 0

    async def look(self, batch: Batch, stats: StepStats) -> None:
        """Keep the batch of a bad step. Raises BadStep, which names the file, where that is to stop training."""
        if not is_bad(stats):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        file: Path | None = None
        if self._options.folder is not None:
            file = batch_file(self._options.folder.absolute() / "bad_batches", stats.step)
            await anyio.to_thread.run_sync(functools.partial(_keep, file, batch, stats))
        loss, norm = (stats.metrics.get(name, math.nan) for name in ("loss", "grad_norm"))
        log.warning("bad_step", step=stats.step, loss=loss, grad_norm=norm, in_a_row=self._in_a_row, file=str(file))
        if self._options.bad_steps == "stop" or self._in_a_row >= self._options.max_bad_steps_in_a_row:
            row = f" ({self._in_a_row} such steps in a row)" if self._in_a_row > 1 else ""
            where = "" if file is None else f"; its batch is in {file}"
            raise BadStep(
                f"step {stats.step} left the weights as they were{row}: loss {loss:g}, gradient norm {norm:g}{where} "
                "(trainer.skip_grad_norm is the bound, trainer.bad_steps what follows)",
                step=stats.step,
                file=file,
            )


def is_bad(stats: StepStats) -> bool:
    """Whether the ranks left the update out for its numbers, rather than for want of tokens to train."""
    return stats.metrics.get("skipped", 0.0) > 0 and stats.metrics.get("tokens_trained", 0.0) > 0


def _keep(file: Path, batch: Batch, stats: StepStats) -> None:
    write_batch(file, batch)
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in stats.metrics.items()}
    text = json.dumps({"step": stats.step, **metrics}, indent=2)
    file.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
