"""Counters of the executor, kept apart from the account of groups: these may be read at any moment, for display."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """A snapshot. Counts are since the executor was made; evaluation is included."""

    tokens_generated: int
    """Tokens received from engines, those of dropped answers included."""
    requests: int
    """Requests sent."""
    retries: int
    """Requests sent because an earlier one of the same trajectory was interrupted."""
    stale_answers_dropped: int
    """Answers whose label named another incarnation than the lease's."""
    aborted: int
    """Abort calls made for own requests."""
    running: int
    """Requests open now."""
    abstained: int
    """Samples without a reward, for whatever reason."""
    reward_errors: int
    """Of those: the scorer raised, or returned something that is not a finite number."""


@dataclass(slots=True)
class ExecutorCounters:
    """The live counters behind ExecutorStatistics."""

    tokens_generated: int = 0
    requests: int = 0
    retries: int = 0
    stale_answers_dropped: int = 0
    aborted: int = 0
    running: int = 0
    abstained: int = 0
    reward_errors: int = 0

    def snapshot(self) -> ExecutorStatistics:
        """The counters as they are now."""
        return ExecutorStatistics(**{field.name: getattr(self, field.name) for field in fields(self)})
