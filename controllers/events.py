"""What happened to the fleet, as frozen values. They are the only way other parts hear of engines and versions.

Every event is written to `events.jsonl` by its class name, with `engine`, `incarnation` and its other fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from controllers.weight_versions import WeightVersion


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class EngineEvent(Event):
    """Something about one incarnation of one engine."""

    engine: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class EngineStateChanged(EngineEvent):
    """Published by every transition. `state` and `previous` are class names of controllers.engine_state."""

    state: str
    previous: str | None
    reason: str | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLaunched(EngineEvent):
    """A new incarnation answers and needs weights (it is Syncing)."""

    url: str
    pid: int
    ranks: int


@dataclass(frozen=True, slots=True)
class VersionProven(EngineEvent):
    """Every rank of this incarnation proved `version`; always before Serving(version)."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class EngineExited(EngineEvent):
    """The engine's process ended."""

    returncode: int | None
    detail: str
    expected: bool


@dataclass(frozen=True, slots=True)
class ProbeFailed(EngineEvent):
    """A health probe had no good answer."""

    consecutive: int
    detail: str


@dataclass(frozen=True, slots=True)
class EngineUnhealthy(EngineEvent):
    """Enough probes in a row failed, with no progress between them."""

    detail: str


@dataclass(frozen=True, slots=True)
class EngineRestarted(EngineEvent):
    """A new incarnation of a restarted engine is Serving. `planned` tells a restart on purpose from a crash."""

    planned: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class VersionPublished(Event):
    """A version was committed: all trainer ranks have staged it."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class TrainerLost(Event):
    """A trainer's rank died or hung, so its whole group, the `incarnation`th of the run, was given up after `step`."""

    incarnation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerRebuilt(Event):
    """New ranks stand where the lost ones stood: at `step`, after `replayed` updates since the last checkpoint."""

    incarnation: int
    step: int
    replayed: int
    rebuild_s: float


@dataclass(frozen=True, slots=True)
class StaleMessageDropped(EngineEvent):
    """A message named an incarnation that is not the engine's current one."""

    message: str


@dataclass(frozen=True, slots=True)
class RollingRestartStarted(Event):
    engines: tuple[str, ...]
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class RollingRestartFinished(Event):
    engines: tuple[str, ...]
    outcome: str
