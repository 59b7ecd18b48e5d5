"""The bound on trajectories in flight. A group takes all its permits at once, so that it is dispatched together."""

from __future__ import annotations

import anyio


class Permits:
    """A counter that the dispatcher waits on. `total` None is no bound."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._taken = 0
        self._freed = anyio.Event()

    @property
    def taken(self) -> int:
        """Permits in use."""
        return self._taken

    def has_room(self, count: int) -> bool:
        """Whether `count` permits are free."""
        return self._total is None or self._taken + count <= self._total

    def take(self, count: int) -> None:
        """Take `count` permits; the caller has seen that there is room."""
        self._taken += count

    def give_back(self, count: int) -> None:
        """Give `count` permits back and wake the dispatcher."""
        self._taken -= count
        self._freed.set()
        self._freed = anyio.Event()

    async def freed(self) -> None:
        """Return when permits are next given back."""
        await self._freed.wait()
