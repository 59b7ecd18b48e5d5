"""What a training loop iterates over: iterator objects, never async generators.

Their tasks belong to the executor, so a `break` leaves nothing half-finished, and iterating again goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

from executors.errors import StreamBusy
from executors.trajectory import Batch, Group

Item = TypeVar("Item")


class _Stream(Generic[Item]):
    """Asks the executor for the next item; ends when there will be no more."""

    def __init__(self, next_item: Callable[[], Awaitable[Item | None]]) -> None:
        self._next_item = next_item
        self._waiting = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        """The next item. Raises RolloutFailed, from the cause, when the executor can make no more."""
        if self._waiting:
            raise StreamBusy("another task is waiting on this stream")
        self._waiting = True
        try:
            item = await self._next_item()
        finally:
            self._waiting = False
        if item is None:
            raise StopAsyncIteration
        return item


class GroupStream(_Stream[Group]):
    """Finished groups, the oldest first."""


class BatchStream(_Stream[Batch]):
    """Batches of `groups_per_step` groups, one for each optimizer step."""
