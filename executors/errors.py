"""Errors of the data plane, in the tree of controllers.errors.

RolloutError
├── TrajectoryFailed        one sample was given up for good (`reason`)
├── RolloutFailed           the executor's own tasks ended; the cause is chained
├── NoUsableGroups          too many groups in a row were filtered, dropped or failed
├── NegativeStaleness       a sample newer than the weights that were trained
├── StreamBusy              a second stream, or a second reader of one
├── ExecutorClosed          used outside its `async with` block
└── JournalFailed           the run's journal can no longer be written
"""

from __future__ import annotations

from controllers.errors import MilesError


class RolloutError(MilesError):
    """Root of the data plane's errors."""


class TrajectoryFailed(RolloutError):
    """One sample was given up for good: `reason` is a short word that is counted, `request_id` its last request."""


class RolloutFailed(RolloutError):
    """No more groups will come. The error that ended the executor's tasks is its cause."""


class NoUsableGroups(RolloutError):
    """So many groups in a row were filtered, dropped or failed that waiting for a batch is hopeless (`groups`)."""


class NegativeStaleness(RolloutError):
    """A group was sampled by weights of an optimizer step that has not been done (`group_id`, `staleness`)."""


class StreamBusy(RolloutError):
    """Another prompt source is still being streamed, or another task is waiting on this stream."""


class ExecutorClosed(RolloutError):
    """The executor was used before its `async with` block was entered, or after it was left."""


class JournalFailed(RolloutError):
    """The journal's writer ended, or cannot keep up; its own error, if any, is the cause (`path`)."""
