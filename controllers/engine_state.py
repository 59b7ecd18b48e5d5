"""Engine states: frozen types that carry only what is valid in them, and one table of legal changes.

    Launching -> Syncing -> Serving <-> Updating        any -> Failed -> Launching | Stopped
                              |
                              v
                           Draining -> Stopped | Launching (a new incarnation)
"""

from __future__ import annotations

from dataclasses import dataclass

from controllers.errors import IllegalTransition
from controllers.weight_versions import WeightVersion


@dataclass(frozen=True, slots=True)
class Launching:
    """The process is being started, with dummy weights."""


@dataclass(frozen=True, slots=True)
class Syncing:
    """The process answers; it has no proven weights yet."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Every rank of this incarnation proved `version`; leases are granted."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Updating:
    """Paused between two proven versions. Counts as serving for availability; new leases wait."""

    version: WeightVersion
    target: WeightVersion


@dataclass(frozen=True, slots=True)
class Draining:
    """No lease is granted; holders have until `deadline` (event loop clock, seconds)."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The incarnation is dead or was given up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Ended on purpose, or out of restart budget."""


EngineState = Launching | Syncing | Serving | Updating | Draining | Failed | Stopped

_LEGAL: dict[type[EngineState], frozenset[type[EngineState]]] = {
    Launching: frozenset({Syncing, Failed, Stopped}),
    Syncing: frozenset({Serving, Failed, Draining, Stopped}),
    Serving: frozenset({Updating, Draining, Failed, Stopped}),
    Updating: frozenset({Serving, Failed, Stopped}),
    Draining: frozenset({Stopped, Launching, Failed}),
    Failed: frozenset({Launching, Stopped}),
    Stopped: frozenset({Launching}),
}


def transition(old: EngineState, new: EngineState) -> EngineState:
    """Return `new` if the table allows it after `old`; raise IllegalTransition otherwise."""
    if type(new) not in _LEGAL[type(old)]:
        raise IllegalTransition(
            f"{type(old).__name__} -> {type(new).__name__} is not a legal change of state", old=old, new=new
        )
    return new


def is_available(state: EngineState) -> bool:
    """Whether the state counts towards the availability budget: it serves, or is in the pause of an update."""
    return isinstance(state, Serving | Updating)
