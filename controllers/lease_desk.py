"""Grants leases: least loaded or sticky, and in the order they were asked for when engines are full or away.

Invariant: after every change of the fleet and every release no waiter is left that could be served, so a newcomer that
finds a free slot overtakes nobody. Slots are counted when granted, in the granter's turn of the event loop, so two
waiters never get one slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from controllers import routing
from controllers.engine_state import Serving
from controllers.errors import FleetDegraded, MilesError, WaitTimeout
from controllers.fleet import Fleet, Life, Member
from controllers.lease import Lease


@dataclass(eq=False, slots=True)
class _Waiter:
    exclude: frozenset[str]
    sticky: str | None
    woken: anyio.Event = field(default_factory=anyio.Event)
    lease: Lease | None = None
    error: MilesError | None = None


class LeaseDesk:
    """Where leases are asked for. `max_concurrency` leases per engine at most."""

    def __init__(self, fleet: Fleet, max_concurrency: int) -> None:
        self._fleet = fleet
        self._max_concurrency = max_concurrency
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()
        self._closed = False
        self.granted = 0
        self.held = 0
        fleet.add_listener(self._serve_waiters)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, *, exclude: frozenset[str], sticky: str | None, timeout_s: float) -> Lease:
        """Wait for a slot. Raises WaitTimeout, or FleetDegraded when no engine will ever serve again."""
        waiter = _Waiter(exclude, sticky)
        if not self._try(waiter, self._open_members()):
            with anyio.move_on_after(timeout_s):
                await self._wait_turn(waiter)
        if waiter.error is not None:
            raise waiter.error
        if waiter.lease is None:
            states = "; ".join(str(member) for member in self._fleet.members)
            waited_for = "a free slot on a serving engine"
            raise WaitTimeout(f"no {waited_for[2:]} within {timeout_s} s ({states})", waited_for=waited_for)
        return waiter.lease

    def close(self) -> None:
        """Refuse everybody from now on."""
        self._closed = True
        self._serve_waiters()

    async def _wait_turn(self, waiter: _Waiter) -> None:
        """Queue until `waiter` has an error, or a lease that still holds when its task gets to run."""
        self._waiters[waiter] = None
        while True:
            try:
                await waiter.woken.wait()
            except BaseException:
                if waiter.lease is not None:  # granted in the very turn of the loop in which we were cancelled
                    waiter.lease.release()
                    waiter.lease = None
                raise
            finally:
                self._waiters.pop(waiter, None)
            lease = waiter.lease
            if lease is None or self._holds(lease):
                return
            # Between the grant and this turn the engine began an update or left service: back to the head of the queue.
            waiter.lease, waiter.woken = None, anyio.Event()
            self._waiters[waiter] = None
            self._waiters.move_to_end(waiter, last=False)
            lease.release()
            self._serve_waiters()

    def _holds(self, lease: Lease) -> bool:
        member = self._fleet.member(lease.engine)
        return member.takes_leases and member.incarnation == lease.incarnation and member.version == lease.version

    def _serve_waiters(self) -> None:
        if not self._waiters:
            return
        members = self._open_members()
        hopeless = self._hopeless()
        if not members and hopeless is None:
            return
        served = []
        for waiter in self._waiters:
            if self._try(waiter, members):
                served.append(waiter)
                if waiter.lease is not None:
                    members = [member for member in members if member.in_flight < self._max_concurrency]
            if not members and hopeless is None:
                break
        for waiter in served:
            del self._waiters[waiter]
            waiter.woken.set()

    def _try(self, waiter: _Waiter, members: Sequence[Member]) -> bool:
        """Settle `waiter` with a lease or an error if that can be done now."""
        hopeless = self._hopeless()
        if hopeless is not None:
            waiter.error = hopeless
            return True
        candidates = members if not waiter.exclude else self._without(waiter.exclude, members)
        if not candidates:
            return False
        if waiter.sticky is not None:
            waiter.lease = self._grant(routing.sticky(waiter.sticky, candidates))
        else:
            waiter.lease = self._grant(routing.least_loaded(candidates))
        return True

    def _grant(self, member: Member) -> Lease:
        life = member.life
        assert isinstance(member.state, Serving)
        assert life.handle is not None
        life.in_flight += 1
        self.granted += 1
        self.held += 1

        def note_tokens(count: int) -> None:
            life.tokens += count

        return Lease(
            engine=member.engine,
            incarnation=life.incarnation,
            url=life.handle.url,
            version=member.state.version,
            revoked=life.revoked,
            _give_back=lambda: self._take_back(life),
            _note_tokens=note_tokens,
        )

    def _take_back(self, life: Life) -> None:
        life.in_flight -= 1
        self.held -= 1
        if life.revoked.is_set():
            if life.in_flight == 0:  # a drain waits for this
                self._fleet.changes.notify()
        else:
            self._serve_waiters()

    def _open_members(self) -> list[Member]:
        limit = self._max_concurrency
        return [member for member in self._fleet.members if member.life.in_flight < limit and member.takes_leases]

    def _without(self, exclude: frozenset[str], members: Sequence[Member]) -> Sequence[Member]:
        """Excluded engines are avoided only while another one may still serve: better the same engine than none."""
        if all(member.engine in exclude or member.is_gone for member in self._fleet.members):
            return members
        return [member for member in members if member.engine not in exclude]

    def _hopeless(self) -> FleetDegraded | None:
        if self._closed:
            return FleetDegraded("the controller is closed")
        members = self._fleet.members
        if all(member.is_gone for member in members):
            states = "; ".join(str(member) for member in members)
            return FleetDegraded(f"every engine has stopped for good ({states})")
        return None
