"""The pause in which a serving engine changes its weights: Serving -> Updating -> Serving(target), or failed.

Invariant (the reason this is a context manager): whatever happens in the body, an engine is never left paused. It
leaves Updating with a proven version, or it is failed and restarted. Entered by the weight sync service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from controllers.engine_state import Draining, Failed, Serving, Stopped, Updating
from controllers.errors import EngineFailed, VersionRegression, WaitTimeout
from controllers.event_bus import EventBus
from controllers.events import VersionProven
from controllers.fleet import Fleet, Member
from controllers.ports import Engine
from controllers.weight_versions import VersionLedger, WeightVersion


class Update:
    """Handed to the body of `updating`: pause, install, `prove`, set the label, resume; then leave."""

    def __init__(self, engine: Engine, target: WeightVersion, prove: Callable[[], None]) -> None:
        self.engine = engine
        self.target = target
        self.proved = False
        self._prove = prove

    def prove(self) -> None:
        """Record that every rank of the engine has itself proved the target. Raises StaleIncarnation."""
        self._prove()
        self.proved = True


class WeightUpdates:
    """Opens updates, of `timeout_s` each at most. `fail(engine, incarnation, reason)` gives an engine up."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: VersionLedger,
        bus: EventBus,
        timeout_s: float,
        fail: Callable[[str, str, str], None],
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._bus = bus
        self._timeout_s = timeout_s
        self._fail = fail

    @asynccontextmanager
    async def updating(self, engine: str, incarnation: str, target: WeightVersion) -> AsyncIterator[Update]:
        """See InferenceController.updating."""
        member, serving = await self._until_serving(engine, incarnation)
        if target.number < serving.version.number:
            raise VersionRegression(
                f"{incarnation} serves version {serving.version.number}, above the target {target.number}",
                number=target.number,
            )
        handle = member.life.handle
        assert handle is not None
        update = Update(handle, target, lambda: self._prove(engine, incarnation, target))
        self._fleet.transition(member, Updating(serving.version, target), f"update to version {target.number}")
        try:
            with anyio.move_on_after(self._timeout_s) as scope:
                yield update
            if scope.cancelled_caught:
                waited_for = f"the update of {incarnation} to version {target.number}"
                raise WaitTimeout(f"{waited_for} did not end within {self._timeout_s} s", waited_for=waited_for)
        except BaseException as error:
            self._fail(engine, incarnation, f"update to version {target.number} ended by {error!r}")
            raise
        if member.incarnation != incarnation or not isinstance(member.state, Updating):
            raise self._out_of_service(member, incarnation)
        if update.proved:
            self._fleet.transition(member, Serving(target))
        else:
            self._fail(engine, incarnation, f"update to version {target.number} ended without a proof")

    async def _until_serving(self, engine: str, incarnation: str) -> tuple[Member, Serving]:
        while True:
            member = self._fleet.current(engine, incarnation, "update")
            if member.closing or isinstance(member.state, Draining | Failed | Stopped):
                raise self._out_of_service(member, incarnation)
            if isinstance(member.state, Serving):
                return member, member.state
            await self._fleet.changes.wait()

    def _prove(self, engine: str, incarnation: str, version: WeightVersion) -> None:
        member = self._fleet.current(engine, incarnation, "proof of an update")
        if not isinstance(member.state, Updating):
            raise self._fleet.stale(member, incarnation, "proof of an update")
        self._ledger.prove(incarnation, version)
        self._bus.publish(VersionProven(engine, incarnation, version))

    def _out_of_service(self, member: Member, incarnation: str) -> EngineFailed:
        reason = "asked to drain" if member.closing else member.reason or type(member.state).__name__
        return EngineFailed(
            f"{incarnation} left service: {reason}", engine=member.engine, incarnation=incarnation, reason=reason
        )
