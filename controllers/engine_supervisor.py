"""The life of one engine over its incarnations: launch, wait for proven weights, serve, drain or crash, and again.

    run: [ launch -> Syncing -> (admitted) Serving ... until it fails, exits or is ordered away -> stop the process ]
         -> ordered restart: at once | crash: after a backoff, within the budget | else Stopped, until ordered back

What a life waits for, and who unblocks it: the launcher (launch_timeout_s), `enter_service` by the controller's admit
(sync_timeout_s, once there is a version to sync), the engine's own exit, the health probe, `fail`, and `order`.
Invariant: when a life ends, for whatever reason, its process has been stopped before the next one starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import anyio
import structlog

from controllers.engine_state import Draining, Failed, Launching, Serving, Stopped, Syncing, Updating
from controllers.errors import ConfigError, EngineFailed, InfrastructureError, MilesError, WaitTimeout
from controllers.event_bus import EventBus
from controllers.events import EngineExited, EngineLaunched, EngineRestarted
from controllers.fleet import Fleet, Life, Member
from controllers.health import HealthOptions, HealthProbe
from controllers.ports import Engine, EngineExit, EngineLauncher, LaunchSpec
from controllers.weight_versions import VersionLedger, WeightVersion

_BACKOFF_MAX_S = 60.0
_ABORT_TIMEOUT_S = 5.0
_SETTLE_S = 2.0
"""How long holders have, after their requests were aborted, to give their leases back."""
_STOP_MARGIN_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FleetOptions:
    """How many engines, and how patient to be with them.

    `max_concurrency` is leases per engine. `restart_budget` counts crash restarts of one engine over the run; a
    planned restart costs nothing. `needs_weights=False` puts engines into service as they are (nobody syncs them).
    """

    count: int
    max_concurrency: int = 64
    restart_budget: int = 5
    restart_backoff_s: float = 1.0
    launch_timeout_s: float = 180.0
    sync_timeout_s: float = 120.0
    drain_timeout_s: float = 30.0
    max_unavailable: int = 1
    stop_grace_s: float = 5.0
    health: HealthOptions = field(default_factory=HealthOptions)
    needs_weights: bool = True

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("max_concurrency", 1), ("restart_budget", 0), ("max_unavailable", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)!r}", key=name)
        for name in ("restart_backoff_s", "drain_timeout_s", "stop_grace_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)!r}", key=name)
        for name in ("launch_timeout_s", "sync_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}", key=name)


class Order:
    """A restart or a stop asked for on purpose. `wait` returns when it is done and raises if it cannot be."""

    def __init__(self, kind: Literal["restart", "stop"], drain_timeout_s: float) -> None:
        self.kind = kind
        self.drain_timeout_s = drain_timeout_s
        self.error: MilesError | None = None
        self._settled = anyio.Event()

    def settle(self, error: MilesError | None = None) -> None:
        self.error = error
        self._settled.set()

    async def wait(self) -> None:
        await self._settled.wait()
        if self.error is not None:
            raise self.error


class EngineSupervisor:
    """Owns one engine's processes. `run` is its task; the other methods are synchronous and wake it."""

    def __init__(
        self,
        member: Member,
        fleet: Fleet,
        bus: EventBus,
        launcher: EngineLauncher,
        options: FleetOptions,
        ledger: VersionLedger,
    ) -> None:
        self._member = member
        self._fleet = fleet
        self._bus = bus
        self._launcher = launcher
        self._options = options
        self._ledger = ledger
        self._scope: anyio.CancelScope | None = None
        self._admitted = anyio.Event()
        self._ordered = anyio.Event()
        self._pending: Order | None = None
        self._restarting: list[Order] = []
        self._planned = False
        self._exit_reported = False
        self._crashes = 0
        self._crashes_in_a_row = 0
        self._closed = False

    def begin(self) -> None:
        """Enter the first life, so that the engine shows as Launching before `run` has its first turn."""
        self._fleet.begin_life(self._member, planned=False)

    async def run(self) -> None:
        """Keep the engine alive until cancelled. Leaves it Stopped, and its process ended."""
        try:
            while True:
                await self._live(self._member.life)
                self._planned = await self._until_next_life()
                self._fleet.begin_life(self._member, planned=self._planned)
        finally:
            self._closed = True
            self._member.closing = False
            if not isinstance(self._member.state, Stopped):
                self._fleet.transition(self._member, Stopped(), "the controller closed")
            self._abandon_orders("the controller closed")

    def enter_service(self, version: WeightVersion) -> None:
        """Syncing -> Serving, after the proof."""
        member = self._member
        self._fleet.transition(member, Serving(version))
        self._crashes_in_a_row = 0
        self._admitted.set()
        if member.life.number > 1:
            self._bus.publish(
                EngineRestarted(member.engine, member.incarnation, planned=self._planned, restarts=member.restarts)
            )
        done, self._restarting = self._restarting, []
        for order in done:
            order.settle()

    def fail(self, incarnation: str, reason: str) -> None:
        """Take this life out of service at once; its process is stopped and replaced. Harmless if it has ended."""
        member = self._member
        if member.incarnation != incarnation or isinstance(member.state, Failed | Stopped):
            return
        self._fleet.transition(member, Failed(reason), reason)
        if self._scope is not None:
            self._scope.cancel()

    def order(self, kind: Literal["restart", "stop"], drain_timeout_s: float) -> Order:
        """Ask for a restart or a stop. Takes the engine off the list of those that get new leases before it returns."""
        if self._pending is not None and self._pending.kind == kind:
            return self._pending
        order = Order(kind, drain_timeout_s)
        if self._closed:
            order.settle(self._failure("the controller closed"))
            return order
        if self._pending is not None:
            self._pending.settle(self._failure(f"{self._pending.kind} was overtaken by {kind}"))
        self._pending = order
        self._member.closing = True
        self._ordered.set()
        if isinstance(self._member.state, Launching) and self._scope is not None:
            self._scope.cancel()
        self._fleet.notify()
        return order

    async def _live(self, life: Life) -> None:
        """One incarnation, from launch until its process has been stopped."""
        member, handle = self._member, None
        self._admitted = anyio.Event()
        self._exit_reported = False
        try:
            with anyio.CancelScope() as self._scope:
                if self._pending is None:
                    handle = await self._launch(life)
                if handle is not None:
                    await self._serve(life, handle)
            if isinstance(member.state, Launching | Syncing):  # ordered away before it had anything to drain
                self._fleet.transition(member, Failed("ordered away"), "ordered away while starting")
        finally:
            self._scope = None
            if not isinstance(member.state, Draining | Failed | Stopped):
                self._fleet.transition(member, Stopped(), "the controller closed")
            if handle is not None:
                await self._stop(life, handle)
            self._ledger.forget(life.incarnation)

    async def _launch(self, life: Life) -> Engine | None:
        spec = LaunchSpec(life.engine, life.incarnation, f"{life.incarnation}:none")
        try:
            with anyio.fail_after(self._options.launch_timeout_s):
                return await self._launcher.launch(spec)
        except TimeoutError:
            self.fail(life.incarnation, f"did not come up within {self._options.launch_timeout_s} s")
        except InfrastructureError as error:
            self.fail(life.incarnation, f"launch failed: {error}")
        return None

    async def _serve(self, life: Life, handle: Engine) -> None:
        if not isinstance(self._member.state, Launching):
            return  # failed in the very turn in which its launch ended
        life.handle = handle
        self._fleet.transition(self._member, Syncing())
        self._bus.publish(EngineLaunched(life.engine, life.incarnation, handle.url, handle.pid, handle.ranks))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_exit, life, handle)
            tasks.start_soon(self._watch_health, life, handle)
            tasks.start_soon(self._watch_sync, life)
            if not self._options.needs_weights:
                self.enter_service(WeightVersion(0, 0, 0, ""))
            await self._ordered.wait()
            await self._drain(life, handle)
            tasks.cancel_scope.cancel()

    async def _watch_exit(self, life: Life, handle: Engine) -> None:
        try:
            ended = await handle.wait_exit()
        except (InfrastructureError, TimeoutError) as error:  # its host died: as good as an exit
            ended = EngineExit(None, str(error))
        self._exit_reported = True
        self._bus.publish(EngineExited(life.engine, life.incarnation, ended.returncode, ended.detail, expected=False))
        self.fail(life.incarnation, f"process ended with {ended.returncode}: {ended.detail}")

    async def _watch_health(self, life: Life, handle: Engine) -> None:
        probe = HealthProbe(handle, self._options.health, self._bus.publish, lambda: life.tokens)
        self.fail(life.incarnation, await probe.run())

    async def _watch_sync(self, life: Life) -> None:
        # The first publication follows a warm-up of any length; until then there is nothing to be late with.
        await self._fleet.changes.until(lambda: self._ledger.has_commit or self._admitted.is_set())
        with anyio.move_on_after(self._options.sync_timeout_s):
            await self._admitted.wait()
            return
        self.fail(life.incarnation, f"proved no weights within {self._options.sync_timeout_s} s")

    async def _drain(self, life: Life, handle: Engine) -> None:
        """Finish an update under way, revoke the leases, wait for them, abort what is left at the deadline."""
        member, order = self._member, self._pending
        assert order is not None
        if isinstance(member.state, Updating):
            with anyio.move_on_after(self._options.sync_timeout_s):
                await self._fleet.changes.until(lambda: not isinstance(member.state, Updating))
            if isinstance(member.state, Updating):
                self.fail(life.incarnation, f"an update did not end within {self._options.sync_timeout_s} s of a drain")
        if not isinstance(member.state, Serving | Syncing):
            return
        deadline = anyio.current_time() + (order.drain_timeout_s if life.in_flight else 0.0)
        self._fleet.transition(member, Draining(deadline), f"drain to {order.kind}")
        with anyio.CancelScope(deadline=deadline):
            await self._fleet.changes.until(lambda: life.in_flight == 0)
        if life.in_flight == 0:
            return
        _log.warning("drain deadline passed", incarnation=life.incarnation, in_flight=life.in_flight)
        try:
            with anyio.fail_after(_ABORT_TIMEOUT_S):
                await handle.abort_all()
        except (TimeoutError, InfrastructureError) as error:
            _log.warning("abort at the drain deadline failed", incarnation=life.incarnation, error=str(error))
        with anyio.move_on_after(_SETTLE_S):
            await self._fleet.changes.until(lambda: life.in_flight == 0)

    async def _stop(self, life: Life, handle: Engine) -> None:
        """End the process, also while we are being cancelled; bounded."""
        limit_s = self._options.stop_grace_s + _STOP_MARGIN_S
        with anyio.move_on_after(limit_s, shield=True) as scope:
            try:
                await handle.stop(self._options.stop_grace_s)
                if handle.pid and not self._exit_reported:
                    ended = await handle.wait_exit()
                    self._bus.publish(
                        EngineExited(life.engine, life.incarnation, ended.returncode, ended.detail, expected=True)
                    )
            except (InfrastructureError, WaitTimeout, TimeoutError) as error:
                _log.error("stopping an engine failed", incarnation=life.incarnation, error=str(error))
        if scope.cancelled_caught:
            _log.error("an engine did not stop", incarnation=life.incarnation, pid=handle.pid, limit_s=limit_s)

    async def _until_next_life(self) -> bool:
        """Return when the next incarnation is to start: True if it was ordered, False after a crash."""
        member, options = self._member, self._options
        while True:
            order, self._pending = self._pending, None
            self._ordered = anyio.Event()
            if order is not None and order.kind == "restart":
                if isinstance(member.state, Stopped):
                    self._crashes = 0
                self._restarting.append(order)
                return True
            if order is not None:
                member.closing = False
                if not isinstance(member.state, Stopped):
                    self._fleet.transition(member, Stopped(), "drained")
                order.settle()
                self._abandon_orders("it was drained instead")
            elif isinstance(member.state, Failed):
                self._crashes += 1
                self._crashes_in_a_row += 1
                if self._crashes <= options.restart_budget:
                    with anyio.move_on_after(self._backoff_s()):
                        await self._ordered.wait()
                    if self._pending is None:
                        return False
                    continue
                reason = f"out of restart budget ({options.restart_budget}); last: {member.state.reason}"
                self._abandon_orders(reason)  # before the state shows, so that its cause is known to whoever sees it
                self._fleet.transition(member, Stopped(), reason)
            await self._ordered.wait()

    def _backoff_s(self) -> float:
        return min(_BACKOFF_MAX_S, self._options.restart_backoff_s * 2.0 ** (self._crashes_in_a_row - 1))

    def _abandon_orders(self, reason: str) -> None:
        orders = [*self._restarting, *([] if self._pending is None else [self._pending])]
        self._restarting, self._pending = [], None
        for order in orders:
            order.settle(self._failure(reason))

    def _failure(self, reason: str) -> EngineFailed:
        member = self._member
        return EngineFailed(
            f"{member.engine} did not come back: {reason}",
            engine=member.engine,
            incarnation=member.incarnation,
            reason=reason,
        )
