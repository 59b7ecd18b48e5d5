from __future__ import annotations

import anyio
import pytest

from controllers.errors import ConfigError, EngineFailed, FleetDegraded, LaunchFailed
from controllers.events import EngineRestarted, EngineStateChanged, RollingRestartFinished, RollingRestartStarted
from controllers.lease import Lease
from tests.controllers.harness import World, about, running, version
from tests.fakes.launcher import FakeLauncher
from tests.support.virtual_time import virtual_time


def least_available_during_the_plan(world: World) -> int:
    """Replays the event log: the fewest engines in service between the plan's start and its end."""
    events = world.log.events
    begin = next(i for i, event in enumerate(events) if isinstance(event, RollingRestartStarted))
    end = next(i for i, event in enumerate(events) if isinstance(event, RollingRestartFinished))
    states: dict[str, str] = {}
    least = 10**9
    for i, event in enumerate(events[:end]):
        if isinstance(event, EngineStateChanged):
            states[event.engine] = event.state
        if i >= begin:
            least = min(least, sum(state in ("Serving", "Updating") for state in states.values()))
    return least


async def work(world: World, done: anyio.Event) -> None:
    """Holds leases all the time; lets go 3 s after it is asked to."""
    while not done.is_set():
        async with world.controller.lease(timeout_s=1000) as lease:
            with anyio.move_on_after(10):
                await lease.revoked.wait()
                await anyio.sleep(3)


@pytest.mark.parametrize(("count", "max_unavailable"), [(2, 1), (3, 1), (4, 2), (5, 4)])
def test_invariant_6_enough_engines_serve_at_every_moment(count: int, max_unavailable: int) -> None:
    """Invariant 6, under load and with updates going on.

    Guards the comparison with max_unavailable in RollingRestart._until_budget_allows.
    """

    @virtual_time
    async def scenario() -> None:
        launcher = FakeLauncher(launch_s=20)
        async with running(count, launcher=launcher, max_unavailable=max_unavailable) as world:
            world.controller.commit_version(version(2))
            done = anyio.Event()
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(work, world, done)
                tasks.start_soon(update_last_engine, world, count)
                await anyio.sleep(5)
                await world.controller.rolling_restart()
                done.set()
            assert least_available_during_the_plan(world) == count - max_unavailable
            assert [each.restarts for each in world.controller.snapshot()] == [1] * count
            assert all(event.planned for event in world.log.of(EngineRestarted))
            [finished] = world.log.of(RollingRestartFinished)
            assert finished.outcome == "finished"
            assert len(finished.engines) == count

    scenario()


async def update_last_engine(world: World, count: int) -> None:
    """An update that is still going on when the engine's turn comes."""
    engine = f"engine-{count - 1}"
    async with world.controller.updating(engine, world.now(engine).incarnation, version(2)) as update:
        await anyio.sleep(60)
        update.prove()


@virtual_time
async def test_an_engine_that_is_about_to_leave_counts_as_gone() -> None:
    """Guards `closing` in Member.is_out: an engine that finishes its update before it drains is still Updating."""
    async with running(3, launcher=FakeLauncher(launch_s=5)) as world, anyio.create_task_group() as tasks:
        world.controller.commit_version(version(2))
        async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
            tasks.start_soon(world.controller.rolling_restart)
            await anyio.sleep(50)
            assert [each.state for each in world.controller.snapshot()] == ["Updating", "Serving", "Serving"]
            update.prove()
    assert least_available_during_the_plan(world) == 2


@virtual_time
async def test_it_waits_for_an_engine_that_is_out_already() -> None:
    launcher = FakeLauncher(launch_s=20)
    async with running(2, launcher=launcher) as world:
        world.engine("engine-1").exit(-9)
        await world.until_state("Failed", "engine-1")
        await world.controller.rolling_restart()
        drained = world.log.times("engine-0", "Draining")[0]
        assert drained >= world.log.times("engine-1", "Serving")[1]


@virtual_time
async def test_a_restart_that_fails_ends_the_plan_and_spares_the_rest() -> None:
    """Guards `self._error` in RollingRestart.run: a bad build must not be rolled over the whole fleet."""
    launcher = FakeLauncher()
    async with running(3, launcher=launcher, restart_budget=1) as world:
        launcher.fail_next("engine-0", LaunchFailed("bad flag"), times=9)
        with pytest.raises(EngineFailed, match="bad flag"):
            await world.controller.rolling_restart()
        assert [each.state for each in world.controller.snapshot()] == ["Stopped", "Serving", "Serving"]
        assert [each.restarts for each in world.controller.snapshot()][1:] == [0, 0]
        assert "bad flag" in world.log.of(RollingRestartFinished)[0].outcome


@virtual_time
async def test_stopped_engines_use_up_the_budget() -> None:
    async with running(3) as world:
        await world.controller.drain("engine-2")
        with pytest.raises(FleetDegraded, match="engine-2 Stopped"):
            await world.controller.rolling_restart()
        await world.controller.rolling_restart(max_unavailable=2)
        assert [each.state for each in world.controller.snapshot()] == ["Serving", "Serving", "Stopped"]
        assert [each.restarts for each in world.controller.snapshot()] == [1, 1, 0]


@pytest.mark.parametrize("max_unavailable", [0, 2, 3])
def test_a_budget_that_leaves_nothing_to_serve_is_refused(max_unavailable: int) -> None:
    @virtual_time
    async def scenario() -> None:
        async with running(2) as world:
            with pytest.raises(ConfigError, match="max_unavailable"):
                await world.controller.rolling_restart(max_unavailable=max_unavailable)
            assert world.log.of(RollingRestartStarted) == []

    scenario()


@virtual_time
async def test_a_fleet_of_one_restarts_its_one() -> None:
    async with running(1) as world:
        await world.controller.rolling_restart()
        assert world.now().restarts == 1


@virtual_time
async def test_two_plans_come_one_after_the_other() -> None:
    async with running(2, launcher=FakeLauncher(launch_s=5)) as world, anyio.create_task_group() as tasks:
        tasks.start_soon(world.controller.rolling_restart)
        tasks.start_soon(world.controller.rolling_restart)
    kinds = [
        type(event).__name__
        for event in world.log.events
        if isinstance(event, RollingRestartStarted | RollingRestartFinished)
    ]
    assert kinds == ["RollingRestartStarted", "RollingRestartFinished"] * 2
    assert [each.restarts for each in world.controller.snapshot()] == [2, 2]


@virtual_time
async def test_a_cancelled_plan_says_so_and_takes_no_further_engine() -> None:
    async with running(3, launcher=FakeLauncher(launch_s=20)) as world:
        with anyio.move_on_after(5):
            await world.controller.rolling_restart()
        assert world.log.of(RollingRestartFinished)[0].outcome == "cancelled"
        await world.controller.wait_serving(timeout_s=100)
        assert [each.restarts for each in world.controller.snapshot()] == [1, 0, 0]


@virtual_time
async def test_its_drain_timeout_reaches_the_leases() -> None:
    async with running(2, drain_timeout_s=30) as world, anyio.create_task_group() as tasks:
        leases: list[Lease] = []

        async def hold() -> None:
            async with world.controller.lease(timeout_s=1) as lease:
                leases.append(lease)
                await lease.revoked.wait()

        tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        await world.controller.rolling_restart(drain_timeout_s=7)
        assert leases[0].revoked.deadline == about(7)
