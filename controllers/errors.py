"""The exception tree. Every error Miles raises derives from MilesError, carries its ids as attributes, and pickles.

MilesError
├── ConfigError                 a key or an argument is wrong: exit code 2
├── InfrastructureError
│   ├── LaunchFailed            an engine did not come up
│   ├── EngineUnreachable       no answer, or the connection broke
│   ├── EngineRejected          an answer that refuses the call (HTTP 4xx/5xx); not worth retrying as it is
│   ├── ActorDied               a Ray actor is gone
│   └── PortTaken
├── CheckpointFailed            a checkpoint could not be written, or not be read
├── IllegalTransition           an engine state change that the table does not hold
├── StaleIncarnation            a message about an engine from an earlier life of it
├── EngineFailed                the engine left service while it was being used
├── FleetDegraded               too few engines are left, and none will come
├── WaitTimeout                 a deadline passed; names what was waited for
├── SubscriberOverflow          an event subscriber fell behind, and was closed rather than losing events silently
└── WeightSyncError
    ├── VersionRegression       a version that does not rise
    └── PublishFailed
"""

from __future__ import annotations

from typing import Any


class MilesError(Exception):
    """Root of all errors of Miles. Keyword arguments become attributes, and survive pickling."""

    def __init__(self, message: str, **ids: Any) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __getattr__(self, name: str) -> Any:
        ids = self.__dict__.get("ids", {})
        if name in ids:
            return ids[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.ids))


def _rebuild(cls: type[MilesError], message: str, ids: dict[str, Any]) -> MilesError:
    return cls(message, **ids)


class ConfigError(MilesError):
    """A configuration key or argument is wrong. The message names the key and quotes the value."""


class InfrastructureError(MilesError):
    """Something outside this process failed."""


class LaunchFailed(InfrastructureError):
    """An engine did not come up; the message holds the last lines it printed."""


class EngineUnreachable(InfrastructureError):
    """No answer from an engine, or the connection broke in mid-answer."""


class EngineRejected(InfrastructureError):
    """An engine answered and refused (`status` holds the HTTP status)."""


class ActorDied(InfrastructureError):
    """A Ray actor is gone (`actor`)."""


class PortTaken(InfrastructureError):
    """A port that was asked for is in use (`port`)."""


class CheckpointFailed(MilesError):
    """A checkpoint could not be written, so there is none at `folder`, or not be read. Training could go on."""


class IllegalTransition(MilesError):
    """An engine state change that the transition table does not hold."""


class StaleIncarnation(MilesError):
    """A message names an incarnation of an engine that is no longer the current one."""


class EngineFailed(MilesError):
    """An engine left service while it was being used (`engine`, `incarnation`, `reason`)."""


class FleetDegraded(MilesError):
    """Fewer engines are left than a request needs, and none is on its way."""


class WaitTimeout(MilesError):
    """A deadline passed. `waited_for` says in words what for."""


class SubscriberOverflow(MilesError):
    """A subscriber of the event bus fell behind its buffer (`subscriber`, `buffer`) and was closed at the gap."""


class WeightSyncError(MilesError):
    """Publishing weights, or getting them into an engine, failed."""


class VersionRegression(WeightSyncError):
    """A weight version that does not rise above those published before."""


class PublishFailed(WeightSyncError):
    """Not every trainer rank staged the version, so nobody will ever serve it."""
