"""Who is in the fleet: engines, their lives, states and leases in flight. Decides nothing.

Invariant: an engine's state changes in `Fleet.transition` and nowhere else. It checks the table, revokes the leases of
a life that leaves service, publishes EngineStateChanged and then wakes whoever waits, in this order.
A message about an engine names its incarnation; `Fleet.current` drops and counts one from an earlier life.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from controllers.engine_state import (
    Draining,
    EngineState,
    Failed,
    Launching,
    Serving,
    Stopped,
    Updating,
    is_available,
    transition,
)
from controllers.errors import ConfigError, StaleIncarnation
from controllers.event_bus import EventBus
from controllers.events import EngineStateChanged, StaleMessageDropped
from controllers.lease import Revocation
from controllers.ports import Engine
from controllers.weight_versions import WeightVersion

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Life:
    """One incarnation. Its lease count lives here, so a lease of an earlier life cannot touch a later one's."""

    engine: str
    incarnation: str
    number: int
    handle: Engine | None = None
    in_flight: int = 0
    tokens: int = 0
    revoked: Revocation = field(default_factory=Revocation)


@dataclass(slots=True, eq=False)
class Member:
    """One engine of the fleet, over its lives. Written by Fleet and the engine's supervisor only."""

    engine: str
    index: int
    life: Life
    state: EngineState = field(default_factory=Stopped)
    closing: bool = False
    """It was asked to drain: no new lease or update starts, though it may be finishing an update."""
    restarts_planned: int = 0
    restarts_crash: int = 0
    reason: str | None = None

    @property
    def incarnation(self) -> str:
        return self.life.incarnation

    @property
    def in_flight(self) -> int:
        return self.life.in_flight

    @property
    def restarts(self) -> int:
        return self.restarts_planned + self.restarts_crash

    @property
    def version(self) -> WeightVersion | None:
        """The version it serves, or None while it serves none."""
        return self.state.version if isinstance(self.state, Serving | Updating) else None

    @property
    def takes_leases(self) -> bool:
        return isinstance(self.state, Serving) and not self.closing

    @property
    def is_out(self) -> bool:
        """Whether it counts against the availability budget: out of service, or about to be."""
        return self.closing or not is_available(self.state)

    @property
    def is_gone(self) -> bool:
        """Whether it has stopped and nobody has ordered it back."""
        return isinstance(self.state, Stopped) and not self.closing

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        version = f" version {self.version.number}" if self.version is not None else ""
        return f"{self.engine} {type(self.state).__name__}{version}{why}"


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One engine as it is now. `version` is the number it serves; `pid` and `url` are None before it answers."""

    engine: str
    incarnation: str
    state: str
    version: int | None
    pid: int | None
    url: str | None
    in_flight: int
    restarts: int
    reason: str | None


class Changes:
    """A waker: `wait` returns at the next `notify`."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for `holds()`, looked at now and after every change."""
        while not holds():
            await self.wait()


class Fleet:
    """The members, in order of their index. Incarnation ids are unique over the run, and none is a prefix of another
    (SGLang aborts by prefix)."""

    def __init__(self, count: int, run_id: str, bus: EventBus) -> None:
        self._bus = bus
        self._run_id = run_id
        self._index_width = len(str(count - 1))
        self._listeners: list[Callable[[], None]] = []
        self.changes = Changes()
        self.stale_messages = 0
        names = (f"engine-{index}" for index in range(count))
        self.members = tuple(Member(name, index, Life(name, "", 0)) for index, name in enumerate(names))
        self._members = {member.engine: member for member in self.members}

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, once its event is published."""
        self._listeners.append(listener)

    def member(self, engine: str) -> Member:
        """Raises ConfigError for an id that is not in the fleet."""
        member = self._members.get(engine)
        if member is None:
            raise ConfigError(f"there is no engine {engine!r}; the fleet has {', '.join(self._members)}", engine=engine)
        return member

    def current(self, engine: str, incarnation: str, message: str) -> Member:
        """The engine, if `incarnation` is its present life; else count the message and raise StaleIncarnation."""
        member = self.member(engine)
        if member.incarnation != incarnation:
            raise self.stale(member, incarnation, message)
        return member

    def stale(self, member: Member, incarnation: str, message: str) -> StaleIncarnation:
        """Count and report a dropped message; return the error to raise."""
        self.stale_messages += 1
        self._bus.publish(StaleMessageDropped(member.engine, incarnation, message))
        return StaleIncarnation(
            f"{message}: {incarnation} is not in service any more; now {member} as {member.incarnation}",
            engine=member.engine,
            incarnation=incarnation,
            current=member.incarnation,
        )

    def begin_life(self, member: Member, *, planned: bool, reason: str | None = None) -> Life:
        """Start a new incarnation: Launching."""
        number = member.life.number + 1
        incarnation = f"e{member.index:0{self._index_width}d}-{number:04d}-{self._run_id}"
        if number > 1 and planned:
            member.restarts_planned += 1
        elif number > 1:
            member.restarts_crash += 1
        member.life = Life(member.engine, incarnation, number)
        member.closing = False
        self.transition(member, Launching(), reason)
        return member.life

    def transition(self, member: Member, state: EngineState, reason: str | None = None) -> None:
        """Change the state of a member: the one place that does. Raises IllegalTransition, changing nothing."""
        old = member.state
        member.state = transition(old, state)
        member.reason = reason
        if isinstance(state, Draining):
            member.life.revoked.set(reason or "draining", state.deadline)
        elif isinstance(state, Failed | Stopped):
            member.life.revoked.set(reason or "stopped", anyio.current_time())
        first = member.life.number == 1 and isinstance(state, Launching)
        changed = EngineStateChanged(
            member.engine,
            member.incarnation,
            state=type(state).__name__,
            previous=None if first else type(old).__name__,
            reason=reason,
            version=None if member.version is None else member.version.number,
        )
        _log.info(
            "engine state",
            engine=member.engine,
            incarnation=member.incarnation,
            state=changed.state,
            previous=changed.previous,
            reason=reason,
            version=changed.version,
        )
        self._bus.publish(changed)
        self.notify()

    def notify(self) -> None:
        """Wake whoever waits for the fleet to change."""
        for listener in self._listeners:
            listener()
        self.changes.notify()

    def snapshot(self) -> tuple[EngineSnapshot, ...]:
        return tuple(
            EngineSnapshot(
                engine=member.engine,
                incarnation=member.incarnation,
                state=type(member.state).__name__,
                version=None if member.version is None else member.version.number,
                pid=None if member.life.handle is None else member.life.handle.pid,
                url=None if member.life.handle is None else member.life.handle.url,
                in_flight=member.in_flight,
                restarts=member.restarts,
                reason=member.reason,
            )
            for member in self.members
        )

    def states(self) -> dict[str, int]:
        """How many engines are in each state, by its class name."""
        return dict(Counter(type(member.state).__name__ for member in self.members))
