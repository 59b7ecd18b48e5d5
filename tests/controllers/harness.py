"""A controller over fake engines, with its event log and a stand-in for the weight sync service that admits engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import pytest

from controllers.errors import StaleIncarnation
from controllers.event_bus import Subscription
from controllers.events import EngineLaunched, EngineStateChanged, Event
from controllers.fleet import EngineSnapshot
from controllers.health import HealthOptions
from controllers.inference_controller import FleetOptions, InferenceController
from controllers.weight_versions import MemoryLedgerStore, VersionLedger, WeightVersion
from tests.fakes.engine import FakeEngine
from tests.fakes.launcher import FakeLauncher

E = TypeVar("E", bound=Event)

NO_HEALTH = HealthOptions(interval_s=1e6)
"""For tests about something else: no probe comes."""


def version(number: int) -> WeightVersion:
    return WeightVersion(number, step=number - 1, lineage=0, digest=f"{number:016x}")


def about(seconds: float) -> Any:
    """`anyio.wait_all_tasks_blocked` moves the clock by a tenth of a second."""
    return pytest.approx(seconds, abs=0.25)


@dataclass
class EventLog:
    """A sink: every event with the virtual time it came at."""

    entries: list[tuple[float, Event]] = field(default_factory=list)

    def __call__(self, _wall: float, event: Event) -> None:
        self.entries.append((anyio.current_time(), event))

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.entries]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def states(self, engine: str) -> list[str]:
        return [each.state for each in self.of(EngineStateChanged) if each.engine == engine]

    def times(self, engine: str, state: str) -> list[float]:
        """When `engine` entered `state`."""
        return [
            at
            for at, event in self.entries
            if isinstance(event, EngineStateChanged) and event.engine == engine and event.state == state
        ]


@dataclass
class World:
    """What a test looks at."""

    controller: InferenceController
    launcher: FakeLauncher
    log: EventLog

    def now(self, engine: str = "engine-0") -> EngineSnapshot:
        return next(each for each in self.controller.snapshot() if each.engine == engine)

    def engine(self, engine: str = "engine-0") -> FakeEngine:
        return self.launcher.newest(engine)

    def in_flight(self) -> list[int]:
        return [each.in_flight for each in self.controller.snapshot()]

    async def until_state(self, state: str, engine: str = "engine-0", timeout_s: float = 1000.0) -> EngineSnapshot:
        """Wait, by events, until `engine` is in `state`."""
        with anyio.fail_after(timeout_s):
            async with self.controller.bus.subscribe("test", kinds=(EngineStateChanged,)) as changes:
                while self.now(engine).state != state:
                    await anext(changes)
        return self.now(engine)


def make_controller(launcher: FakeLauncher, **options: Any) -> InferenceController:
    options.setdefault("health", NO_HEALTH)
    return InferenceController(launcher, VersionLedger(MemoryLedgerStore()), FleetOptions(**options), run_id="ab12")


@asynccontextmanager
async def running(
    count: int = 1, *, admit: bool = True, serving: bool = True, launcher: FakeLauncher | None = None, **options: Any
) -> AsyncIterator[World]:
    """A controller entered, version 1 published, engines admitted as they come (`admit`) and all up (`serving`)."""
    launcher = launcher or FakeLauncher()
    controller = make_controller(launcher, count=count, **options)
    log = EventLog()
    controller.bus.add_sink(log)
    controller.commit_version(version(controller.reserve_version()))
    async with anyio.create_task_group() as tasks, controller.bus.subscribe("admitter") as launches:
        async with controller:
            if admit:
                tasks.start_soon(admit_all, controller, launches)
                if serving:
                    await controller.wait_serving(timeout_s=100)
            yield World(controller, launcher, log)
        tasks.cancel_scope.cancel()


async def admit_all(controller: InferenceController, launches: Subscription) -> None:
    """Admit every engine that comes up at the newest version, as the weight sync service would."""
    async for event in launches:
        if isinstance(event, EngineLaunched):
            newest = controller.ledger.latest
            assert newest is not None
            try:
                controller.admit(event.engine, event.incarnation, newest)
            except StaleIncarnation:
                continue
