"""The control plane's front: which engines live, which weights each has proven, and who may generate on them.

                      EngineSupervisor (one per engine)  <- launch, exit, health, orders
    callers -> controller -> Fleet: states, the one transition() -> EventBus -> sync service, executor, events.jsonl
                      LeaseDesk (leases)   WeightUpdates (pauses)   RollingRestart (plans)

It moves no weight bytes and knows no prompts. `async with controller` owns every task; leaving it, by whatever way,
stops all engines.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import anyio
from anyio.abc import TaskGroup

from controllers.engine_state import Failed, Serving, Stopped, Syncing, is_available
from controllers.engine_supervisor import EngineSupervisor, FleetOptions
from controllers.errors import FleetDegraded, IllegalTransition, WaitTimeout
from controllers.event_bus import EventBus
from controllers.events import VersionProven, VersionPublished
from controllers.fleet import EngineSnapshot, Fleet, Member
from controllers.health import HealthOptions
from controllers.lease import Lease
from controllers.lease_desk import LeaseDesk
from controllers.ports import Engine, EngineLauncher
from controllers.rolling_restart import RestartPlan, RollingRestart
from controllers.weight_update import Update, WeightUpdates
from controllers.weight_versions import VersionLedger, WeightVersion

__all__ = ["FleetOptions", "FleetStatistics", "HealthOptions", "InferenceController"]


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    """Counts since the start, and as of now (`states` by class name, leases held and waiting)."""

    states: dict[str, int]
    leases_granted: int
    leases_held: int
    leases_waiting: int
    restarts_planned: int
    restarts_crash: int
    stale_messages_dropped: int


class InferenceController:
    """A fleet of engines that is kept alive while the object is entered.

    `bus` and `ledger` are public: subscribe before entering to hear of every event.
    """

    def __init__(
        self, launcher: EngineLauncher, ledger: VersionLedger, options: FleetOptions, run_id: str | None = None
    ) -> None:
        self.bus = EventBus()
        self.ledger = ledger
        self._options = options
        self._fleet = Fleet(options.count, run_id or secrets.token_hex(3), self.bus)
        self._desk = LeaseDesk(self._fleet, options.max_concurrency)
        self._updates = WeightUpdates(self._fleet, ledger, self.bus, options.sync_timeout_s, self._give_up)
        self._supervisors = {
            member.engine: EngineSupervisor(member, self._fleet, self.bus, launcher, options, ledger)
            for member in self._fleet.members
        }
        self._rolling = anyio.Lock()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> InferenceController:
        """Begin to launch every engine; does not wait for them."""
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.bus.watch_sinks)
        for supervisor in self._supervisors.values():
            supervisor.begin()
            self._tasks.start_soon(supervisor.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Stop every engine, all at once, each within its grace. Supervisors shield that from cancellation."""
        assert self._tasks is not None
        self._desk.close()
        self._tasks.cancel_scope.cancel()
        try:
            if isinstance(error, Exception):
                # The body's own error leaves as it is: a task group would wrap what it is told of into a group.
                await self._tasks.__aexit__(None, None, None)
                return None
            swallowed = await self._tasks.__aexit__(kind, error, trace)
        finally:
            self.bus.close()
        if error is None:
            self.bus.raise_sink_error()
        return swallowed

    # -- using engines

    async def wait_serving(self, *, count: int | None = None, version: int | None = None, timeout_s: float) -> None:
        """Wait until `count` engines (all, if None) serve, with at least `version`.

        Raises WaitTimeout, which names the engines that are not there, and FleetDegraded when it cannot happen any
        more because too many engines have stopped for good.
        """
        needed = self._options.count if count is None else count
        with anyio.move_on_after(timeout_s):
            while True:
                missing = [member for member in self._fleet.members if not _serves(member, version)]
                if self._options.count - len(missing) >= needed:
                    return
                gone = [member for member in missing if member.is_gone]
                if self._options.count - len(gone) < needed:
                    raise FleetDegraded(f"{needed} engines cannot serve any more: {_names(gone)}", needed=needed)
                await self._fleet.changes.wait()
        waited_for = f"{needed} engines serving" + ("" if version is None else f" version {version} or newer")
        raise WaitTimeout(
            f"not {waited_for} within {timeout_s} s: {_names(missing)}",
            waited_for=waited_for,
            engines=tuple(member.engine for member in missing),
        )

    @asynccontextmanager
    async def lease(
        self, *, exclude: frozenset[str] = frozenset(), sticky: str | None = None, timeout_s: float
    ) -> AsyncIterator[Lease]:
        """Wait for a Serving engine with a free slot, and hold the slot in the body.

        The least loaded engine, or for `sticky` always the same one of those that are free; first come, first served.
        `exclude` holds engine ids to avoid while another engine may still serve. Raises WaitTimeout and FleetDegraded.
        """
        lease = await self._desk.acquire(exclude=exclude, sticky=sticky, timeout_s=timeout_s)
        try:
            yield lease
        finally:
            lease.release()

    def snapshot(self) -> tuple[EngineSnapshot, ...]:
        """Every engine as it is now, in order."""
        return self._fleet.snapshot()

    def statistics(self) -> FleetStatistics:
        members = self._fleet.members
        return FleetStatistics(
            states=self._fleet.states(),
            leases_granted=self._desk.granted,
            leases_held=self._desk.held,
            leases_waiting=self._desk.waiting,
            restarts_planned=sum(member.restarts_planned for member in members),
            restarts_crash=sum(member.restarts_crash for member in members),
            stale_messages_dropped=self._fleet.stale_messages,
        )

    # -- for the weight sync service

    def reserve_version(self) -> int:
        """Reserve the next version number durably, before a byte is staged under it."""
        return self.ledger.reserve()

    def commit_version(self, version: WeightVersion) -> None:
        """Publish a version that all trainer ranks have staged. Raises VersionRegression unless it rises."""
        self.ledger.commit(version)
        self.bus.publish(VersionPublished(version))
        self._fleet.notify()

    def engine(self, engine: str, incarnation: str) -> Engine:
        """The port to this life of an engine. Raises StaleIncarnation if it has ended, or does not answer yet."""
        member = self._fleet.current(engine, incarnation, "use of an engine")
        if member.life.handle is None or isinstance(member.state, Failed | Stopped):
            raise self._fleet.stale(member, incarnation, "use of an engine")
        return member.life.handle

    def admit(self, engine: str, incarnation: str, version: WeightVersion) -> None:
        """Put a Syncing engine into service, after every rank of it proved `version`.

        Raises StaleIncarnation if this life has ended or was asked to drain, VersionRegression for a version that was
        never published, IllegalTransition if it serves already.
        """
        member = self._fleet.current(engine, incarnation, "admission")
        if is_available(member.state):
            raise IllegalTransition(f"{member} is in service already", old=member.state, new=Serving(version))
        if member.closing or not isinstance(member.state, Syncing):
            raise self._fleet.stale(member, incarnation, "admission")
        self.ledger.prove(incarnation, version)
        self.bus.publish(VersionProven(engine, incarnation, version))
        self._supervisors[engine].enter_service(version)

    def updating(
        self, engine: str, incarnation: str, target: WeightVersion
    ) -> AbstractAsyncContextManager[Update]:
        """Hold an engine in Updating for the body, which pauses, installs, calls `update.prove()` and resumes.

        Waits until the engine is Serving; raises EngineFailed when it left service or was asked to drain,
        StaleIncarnation when this life has ended, VersionRegression when it serves a newer version. Leaving the body
        with a proof puts it back to Serving(target); leaving without one, by an exception or by cancellation fails the
        engine, which is then restarted. So does a body that takes longer than sync_timeout_s: it is cancelled, and
        WaitTimeout raised. Raises EngineFailed on leaving if the engine died meanwhile.
        """
        return self._updates.updating(engine, incarnation, target)

    def fail(self, engine: str, incarnation: str, reason: str) -> None:
        """Take an engine out of service at once; its process is stopped and replaced, within the restart budget.

        Raises StaleIncarnation for an earlier life; harmless for one that has failed already.
        """
        self._fleet.current(engine, incarnation, f"failure ({reason})")
        self._supervisors[engine].fail(incarnation, reason)

    # -- operations

    async def restart(self, engine: str, *, drain_timeout_s: float | None = None) -> None:
        """Drain an engine, stop it, start a new life; return when that serves. Raises EngineFailed if none will.

        Cancelling the call does not take the order back. A crash of the new life is retried within the budget. An
        engine that had stopped is started again, with a fresh budget.
        """
        self._fleet.member(engine)
        await self._supervisors[engine].order("restart", self._drain_timeout_s(drain_timeout_s)).wait()

    async def rolling_restart(
        self, *, max_unavailable: int | None = None, drain_timeout_s: float | None = None
    ) -> None:
        """Restart every engine that has not stopped, at most `max_unavailable` of the fleet being out at any moment.

        One at a time: a second call waits for the first. Raises ConfigError for a budget that would leave nothing to
        serve, EngineFailed or FleetDegraded when an engine does not come back.
        """
        limit = self._options.max_unavailable if max_unavailable is None else max_unavailable
        timeout_s = self._drain_timeout_s(drain_timeout_s)
        RestartPlan((), self._options.count, limit)  # refuse a bad budget before waiting for another plan
        async with self._rolling:
            engines = tuple(member.engine for member in self._fleet.members if not member.is_gone)
            plan = RestartPlan(engines, self._options.count, limit)
            await RollingRestart(
                plan, self._fleet, self.bus, lambda name: self._supervisors[name].order("restart", timeout_s)
            ).run()

    async def drain(self, engine: str, *, timeout_s: float | None = None) -> None:
        """Drain an engine and leave it Stopped."""
        self._fleet.member(engine)
        await self._supervisors[engine].order("stop", self._drain_timeout_s(timeout_s)).wait()

    def _drain_timeout_s(self, asked: float | None) -> float:
        return self._options.drain_timeout_s if asked is None else asked

    def _give_up(self, engine: str, incarnation: str, reason: str) -> None:
        self._supervisors[engine].fail(incarnation, reason)


def _serves(member: Member, version: int | None) -> bool:
    """Whether it is in service (the pause of an update counts) with `version` or a newer one."""
    return member.version is not None and (version is None or member.version.number >= version)


def _names(members: list[Member]) -> str:
    return "; ".join(str(member) for member in members)
