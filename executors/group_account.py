"""The account of training groups: every dispatched group ends in exactly one counted outcome.

Invariant: dispatched = trained + filtered + dropped + failed + buffered + in_flight, after every event. The counters
are kept apart from the table of live groups, so that `lost` is a check and not a definition. Called by the executor.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from executors.errors import RolloutError

Outcome = Literal["trained", "filtered", "dropped", "failed"]


class GroupAccount:
    """Counters of one run's training groups. Evaluation samples are not in it."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.filtered = 0
        self.dropped = 0
        self.failed = 0
        self.buffered = 0
        """Finished and not yet trained: waiting here, or handed to the trainer."""
        self.in_flight = 0
        self.duplicated = 0
        """Times a group that had its outcome was marked trained again. Such a mark is refused."""
        self.reasons: dict[str, Counter[str]] = {"filtered": Counter(), "dropped": Counter(), "failed": Counter()}
        self._buffered_by_id: dict[str, bool] = {}

    @property
    def lost(self) -> int:
        """Dispatched groups that no counter accounts for. Anything but 0 is a bug."""
        known = self.trained + self.filtered + self.dropped + self.failed + self.buffered + self.in_flight
        return self.dispatched - known

    @property
    def live(self) -> int:
        """Groups without an outcome yet."""
        return self.buffered + self.in_flight

    def dispatch(self, group_id: str) -> None:
        """A new group goes out."""
        if group_id in self._buffered_by_id:
            raise RolloutError(f"group {group_id} was dispatched twice", group_id=group_id)
        self._buffered_by_id[group_id] = False
        self.dispatched += 1
        self.in_flight += 1

    def buffer(self, group_id: str) -> None:
        """Its samples are all there; it waits for the trainer."""
        if self._buffered_by_id[group_id]:
            raise RolloutError(f"group {group_id} was buffered twice", group_id=group_id)
        self._buffered_by_id[group_id] = True
        self.in_flight -= 1
        self.buffered += 1

    def finish(self, group_id: str, outcome: Outcome, reason: str | None = None) -> None:
        """The group ends. Raises RolloutError when it has ended before, or was never dispatched."""
        was_buffered = self._buffered_by_id.pop(group_id, None)
        if was_buffered is None:
            raise RolloutError(f"group {group_id} has no open entry to end as {outcome}", group_id=group_id)
        if was_buffered:
            self.buffered -= 1
        else:
            self.in_flight -= 1
        setattr(self, outcome, getattr(self, outcome) + 1)
        if reason is not None:
            self.reasons[outcome][reason] += 1

    def train(self, group_id: str) -> bool:
        """Count a buffered group as trained; False, and `duplicated`, when it is not (any more) buffered."""
        if not self._buffered_by_id.get(group_id, False):
            self.duplicated += 1
            return False
        self.finish(group_id, "trained")
        return True
