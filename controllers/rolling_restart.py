"""A restart of every engine under an availability budget.

Invariant: the plan takes no engine out while `max_unavailable` others are out already, for whatever reason, so at least
`count - max_unavailable` engines serve (or are in the pause of an update) at every moment that it has a say in.
The budget is looked at and the restart ordered in one turn of the event loop: nothing can come in between.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import structlog

from controllers.engine_supervisor import Order
from controllers.errors import ConfigError, FleetDegraded, MilesError
from controllers.event_bus import EventBus
from controllers.events import RollingRestartFinished, RollingRestartStarted
from controllers.fleet import Fleet

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """Restart `engines` in this order, of a fleet of `count`, with at most `max_unavailable` out at once."""

    engines: tuple[str, ...]
    count: int
    max_unavailable: int

    def __post_init__(self) -> None:
        if self.max_unavailable < 1:
            raise ConfigError(
                f"max_unavailable must be at least 1, not {self.max_unavailable!r}", key="max_unavailable"
            )
        if self.count > 1 and self.max_unavailable >= self.count:
            raise ConfigError(
                f"max_unavailable {self.max_unavailable!r} of {self.count} engines would leave none to serve",
                key="max_unavailable",
            )


class RollingRestart:
    """Carries out one plan. `order(engine)` asks for one restart and returns at once."""

    def __init__(self, plan: RestartPlan, fleet: Fleet, bus: EventBus, order: Callable[[str], Order]) -> None:
        self._plan = plan
        self._fleet = fleet
        self._bus = bus
        self._order = order
        self._orders: list[Order] = []
        self._degraded: FleetDegraded | None = None

    @property
    def _error(self) -> MilesError | None:
        """Why the plan has failed: a restart that did, or a fleet that leaves it no room."""
        return next((order.error for order in self._orders if order.error is not None), self._degraded)

    async def run(self) -> None:
        """Return when every engine of the plan serves in a new life.

        A restart that fails ends the plan: engines not yet taken out stay as they are. Raises EngineFailed for it, and
        FleetDegraded when stopped engines use up the budget.
        """
        plan = self._plan
        if plan.count == 1:
            _log.warning("rolling restart of a fleet of one: nothing serves while it restarts", engines=plan.engines)
        self._bus.publish(RollingRestartStarted(plan.engines, plan.max_unavailable))
        outcome = "cancelled"
        try:
            async with anyio.create_task_group() as tasks:
                for engine in plan.engines:
                    await self._until_budget_allows(engine)
                    if self._error is not None:
                        break
                    self._orders.append(self._order(engine))
                    tasks.start_soon(self._follow, self._orders[-1])
            error = self._error
            outcome = "finished" if error is None else f"failed: {error}"
        finally:
            self._bus.publish(RollingRestartFinished(plan.engines, outcome))
        if error is not None:
            raise error

    async def _until_budget_allows(self, engine: str) -> None:
        """Wait until taking `engine` out keeps the budget, or the plan has failed."""
        while self._error is None:
            others = [member for member in self._fleet.members if member.engine != engine]
            stopped = [member for member in others if member.is_gone]
            if len(stopped) >= self._plan.max_unavailable:
                self._degraded = FleetDegraded(
                    f"{engine} cannot be restarted within max_unavailable {self._plan.max_unavailable}: "
                    + "; ".join(str(member) for member in stopped)
                )
            elif sum(member.is_out for member in others) < self._plan.max_unavailable:
                return
            else:
                await self._fleet.changes.wait()

    async def _follow(self, order: Order) -> None:
        with suppress(MilesError):  # kept in the order, and raised by run
            await order.wait()
        self._fleet.changes.notify()
