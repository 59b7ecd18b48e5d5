"""A lease source in memory. Implements executors.ports.LeaseSource the way the controller's lease desk behaves.

    leases.add("engine-0", "i0", version=1)     # serves
    leases.drain("engine-0", grace_s=5)         # no new leases; holders are told
    leases.remove("engine-0")                   # crashed: holders are told, with no time left
    leases.close()                              # FleetDegraded for everybody
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from controllers.errors import FleetDegraded, WaitTimeout
from controllers.lease import Revocation
from controllers.weight_versions import WeightVersion


@dataclass(slots=True)
class FakeLife:
    """One incarnation that serves."""

    engine: str
    incarnation: str
    version: WeightVersion
    revoked: Revocation = field(default_factory=Revocation)
    in_flight: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.incarnation}"


@dataclass(slots=True)
class FakeLease:
    """A granted lease. `version` stays that of the grant."""

    life: FakeLife
    version: WeightVersion

    @property
    def engine(self) -> str:
        return self.life.engine

    @property
    def incarnation(self) -> str:
        return self.life.incarnation

    @property
    def url(self) -> str:
        return self.life.url

    @property
    def cache_salt(self) -> str:
        return f"{self.incarnation}:{self.version.number}"

    @property
    def revoked(self) -> Revocation:
        return self.life.revoked

    def note_tokens(self, count: int) -> None:
        """Progress; the fake keeps no count of it."""


class FakeLeaseSource:
    """Least loaded, `capacity` leases an engine. `serving` maps engine ids to their present lives."""

    def __init__(self, capacity: int = 1000) -> None:
        self.serving: dict[str, FakeLife] = {}
        self.held = 0
        self.granted: list[FakeLease] = []
        self._capacity = capacity
        self._closed = False
        self._changed = anyio.Event()

    def add(self, engine: str, incarnation: str, *, version: int, step: int | None = None) -> FakeLife:
        """Let `incarnation` of `engine` serve weights `version`, of optimizer step `version - 1` unless given."""
        weights = WeightVersion(version, version - 1 if step is None else step, 0, "0" * 16)
        life = self.serving[engine] = FakeLife(engine, incarnation, weights)
        self._wake()
        return life

    def update(self, engine: str, version: int) -> None:
        """The engine now serves `version`; leases keep the version of their grant."""
        self.serving[engine].version = WeightVersion(version, version - 1, 0, "0" * 16)

    def drain(self, engine: str, grace_s: float) -> None:
        self.serving.pop(engine).revoked.set("drain", anyio.current_time() + grace_s)

    def remove(self, engine: str) -> None:
        self.serving.pop(engine).revoked.set("exited", anyio.current_time())

    def close(self) -> None:
        self._closed = True
        self._wake()

    @asynccontextmanager
    async def lease(
        self, *, exclude: frozenset[str] = frozenset(), sticky: str | None = None, timeout_s: float
    ) -> AsyncIterator[FakeLease]:
        life = await self._pick(exclude, timeout_s)
        life.in_flight += 1
        self.held += 1
        lease = FakeLease(life, life.version)
        self.granted.append(lease)
        try:
            yield lease
        finally:
            life.in_flight -= 1
            self.held -= 1
            self._wake()

    async def _pick(self, exclude: frozenset[str], timeout_s: float) -> FakeLife:
        with anyio.move_on_after(timeout_s):
            while True:
                if self._closed:
                    raise FleetDegraded("every engine has stopped for good")
                lives = [life for life in self.serving.values() if life.in_flight < self._capacity]
                lives = [life for life in lives if life.engine not in exclude]
                if lives:
                    return min(lives, key=lambda life: life.in_flight)
                await self._changed.wait()
        raise WaitTimeout(f"no free slot within {timeout_s} s", waited_for="a free slot on a serving engine")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
