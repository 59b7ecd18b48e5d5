"""`RunBatches`: what the loop of a run iterates over, from the executor until the run's last step."""

from __future__ import annotations

import time
from collections.abc import Callable

from executors.streams import BatchStream
from executors.trajectory import Batch


class RunBatches:
    """The batches of one run: an iterator object that ends after `train.steps` steps. A `break` loses nothing."""

    def __init__(self, stream: BatchStream, last_step: int, steps_done: Callable[[], int]) -> None:
        self._stream = stream
        self._last_step = last_step
        self._steps_done = steps_done
        self.wait_s = 0.0
        """How long the newest batch was waited for."""

    def __aiter__(self) -> RunBatches:
        return self

    async def __anext__(self) -> Batch:
        if self._steps_done() >= self._last_step:
            raise StopAsyncIteration
        began = time.monotonic()
        batch = await self._stream.__anext__()
        self.wait_s = time.monotonic() - began
        return batch
