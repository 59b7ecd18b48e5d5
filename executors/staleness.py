"""Admission by staleness: how far generation may run ahead of the weights in service.

    trained + handed out + buffered + in_flight < (published_step + max_staleness + 1) * groups_per_step

counted over the lineage. With every group trained in the order of its dispatch this bounds staleness; a group that
others overtake is checked again when it leaves the buffer. Without a bound (`max_staleness` None: no trainer sets the
pace) buffered + in_flight < 2 * groups_per_step. Woken by whatever makes room, never polled: newer weights, a group
that ends untrained, and without a bound a group that is handed out.
"""

from __future__ import annotations

import anyio

_READ_AHEAD_STEPS = 2
"""Steps' worth of groups ahead of the reader, where staleness is not bounded."""


class AdmissionGate:
    """Counts what takes up room ahead of the weights in service, and lets the dispatcher wait for some."""

    def __init__(self, *, max_staleness: int | None, groups_per_step: int) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._published_step: int | None = None
        self._taken = 0
        self._changed = anyio.Event()

    @property
    def published_step(self) -> int | None:
        """The optimizer step of the newest weights in service; None before any are."""
        return self._published_step

    @property
    def taken(self) -> int:
        """Groups that take up room."""
        return self._taken

    @property
    def limit(self) -> int:
        """How many groups may take up room at the published step."""
        if self._max_staleness is None:
            return _READ_AHEAD_STEPS * self._groups_per_step
        step = -1 if self._published_step is None else self._published_step
        return (step + self._max_staleness + 1) * self._groups_per_step

    def is_open(self) -> bool:
        """Whether one more group may be dispatched."""
        return self._published_step is not None and self._taken < self.limit

    def published(self, step: int) -> None:
        """Weights of optimizer step `step` are in service. Older news is ignored."""
        if self._published_step is None or step > self._published_step:
            self._published_step = step
            self._wake()

    def start_lineage(self, steps_done: int) -> None:
        """Training goes on after `steps_done` steps, each of which took a full batch."""
        self._taken = 0 if self._max_staleness is None else steps_done * self._groups_per_step
        self._wake()

    def take(self) -> None:
        """A group is dispatched."""
        self._taken += 1

    def hand_out(self, groups: int) -> None:
        """A reader took `groups` groups. They keep their room, unless there is no bound on staleness."""
        if self._max_staleness is None:
            self._taken -= groups
            self._wake()

    def give_back(self) -> None:
        """A group ended without being trained; another may take its place."""
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Return when there may be more room."""
        await self._changed.wait()
