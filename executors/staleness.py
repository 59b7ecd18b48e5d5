"""Admission by staleness: how far generation may run ahead of the published weights.

    trained + buffered + in_flight < (published_step + max_staleness + 1) * groups_per_step

counted over the lineage. With every group trained in the order of its dispatch this bounds staleness; a group that
others overtake is checked again when it leaves the buffer. Woken by `published` and by every outcome, never polled.
"""

from __future__ import annotations

import anyio


class AdmissionGate:
    """Counts what takes up room ahead of the published weights, and lets the dispatcher wait for some."""

    def __init__(self, *, max_staleness: int, groups_per_step: int) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._published_step: int | None = None
        self._taken = 0
        self._changed = anyio.Event()

    @property
    def published_step(self) -> int | None:
        """The optimizer step of the newest published weights; None before any are."""
        return self._published_step

    @property
    def taken(self) -> int:
        """Groups trained, buffered and in flight in this lineage."""
        return self._taken

    @property
    def limit(self) -> int:
        """How many groups may be trained, buffered and in flight at the published step."""
        step = -1 if self._published_step is None else self._published_step
        return (step + self._max_staleness + 1) * self._groups_per_step

    def is_open(self) -> bool:
        """Whether one more group may be dispatched."""
        return self._published_step is not None and self._taken < self.limit

    def published(self, step: int) -> None:
        """Weights of optimizer step `step` are published. Older news is ignored."""
        if self._published_step is None or step > self._published_step:
            self._published_step = step
            self._wake()

    def start_lineage(self, steps_done: int) -> None:
        """Training goes on after `steps_done` steps, each of which took a full batch."""
        self._taken = steps_done * self._groups_per_step
        self._wake()

    def take(self) -> None:
        """A group is dispatched."""
        self._taken += 1

    def give_back(self) -> None:
        """A group ended without being trained; another may take its place."""
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        """Return at the next publication or outcome."""
        await self._changed.wait()
