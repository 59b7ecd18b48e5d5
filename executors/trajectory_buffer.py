"""Finished groups that wait for the trainer, oldest weights first.

Staleness is checked when a group leaves, not when it enters: time in the queue counts. Called by the executor.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from executors.errors import NegativeStaleness
from executors.trajectory import Batch, Group


class TrajectoryBuffer:
    """A queue of finished groups, bounded by the admission gate in front of it."""

    def __init__(
        self,
        *,
        max_staleness: int | None,
        on_stale: Callable[[Group], None],
        version_steps: Callable[[int], int],
    ) -> None:
        self._max_staleness = max_staleness
        self._on_stale = on_stale
        self._version_steps = version_steps
        self._groups: list[tuple[int, int, Group]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a finished group."""
        heapq.heappush(self._groups, (group.sampled_step, self._arrivals, group))
        self._arrivals += 1

    def take(self, steps_done: int) -> Group | None:
        """The oldest group that is still fresh enough to be trained as step `steps_done + 1`, or None."""
        self._drop_stale(steps_done)
        return heapq.heappop(self._groups)[2] if self._groups else None

    def take_batch(self, step: int, groups_per_step: int) -> Batch | None:
        """The batch of optimizer step `step`, or None while there are too few groups fresh enough.

        Raises NegativeStaleness for a group that was sampled by weights nobody has trained yet.
        """
        steps_done = step - 1
        self._drop_stale(steps_done)
        if len(self._groups) < groups_per_step:
            return None
        groups = tuple(self._pop(steps_done) for _ in range(groups_per_step))
        versions = {span.version for g in groups for each in g.trajectories for span in each.spans}
        return Batch(
            groups=groups,
            step=step,
            staleness=tuple(steps_done - g.sampled_step for g in groups),
            version_steps={version: self._version_steps(version) for version in sorted(versions)},
        )

    def _drop_stale(self, steps_done: int) -> None:
        if self._max_staleness is None:
            return
        while self._groups and steps_done - self._groups[0][0] > self._max_staleness:
            self._on_stale(heapq.heappop(self._groups)[2])

    def _pop(self, steps_done: int) -> Group:
        group = heapq.heappop(self._groups)[2]
        staleness = steps_done - group.sampled_step
        if staleness < 0:
            raise NegativeStaleness(
                f"group {group.group_id} was sampled by weights of step {group.sampled_step}, "
                f"but only {steps_done} steps have been trained",
                group_id=group.group_id,
                staleness=staleness,
            )
        return group
