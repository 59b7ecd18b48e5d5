from __future__ import annotations

import anyio
import pytest

from controllers.errors import FleetDegraded, IllegalTransition, StaleIncarnation, VersionRegression, WaitTimeout
from controllers.events import Event, StaleMessageDropped, VersionPublished
from controllers.ports import LaunchSpec
from tests.controllers.harness import EventLog, World, make_controller, running, version
from tests.fakes.engine import FakeEngine
from tests.fakes.launcher import FakeLauncher
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_entering_does_not_wait_and_the_engines_show_as_launching() -> None:
    launcher = FakeLauncher(launch_s=50)
    async with make_controller(launcher, count=2) as controller:
        assert anyio.current_time() == 0
        assert [each.state for each in controller.snapshot()] == ["Launching", "Launching"]
        assert [each.pid for each in controller.snapshot()] == [None, None]
        assert controller.statistics().states == {"Launching": 2}


@virtual_time
async def test_wait_serving_names_who_is_not_there() -> None:
    async with running(3) as world:
        world.engine("engine-2").exit(1, "segmentation fault")
        await world.until_state("Failed", "engine-2")
        await world.controller.wait_serving(count=2, timeout_s=0)
        with pytest.raises(WaitTimeout, match=r"engine-2 Failed.*segmentation fault") as caught:
            await world.controller.wait_serving(timeout_s=0.5)
        assert caught.value.waited_for == "3 engines serving"
        assert caught.value.engines == ("engine-2",)


@virtual_time
async def test_wait_serving_at_a_version() -> None:
    async with running(2) as world, anyio.create_task_group() as tasks:
        world.controller.commit_version(version(2))
        with pytest.raises(WaitTimeout, match=r"version 2 or newer.*engine-0 Serving version 1"):
            await world.controller.wait_serving(version=2, timeout_s=1)

        async def update(engine: str, after_s: float) -> None:
            await anyio.sleep(after_s)
            async with world.controller.updating(engine, world.now(engine).incarnation, version(2)) as update:
                update.prove()

        tasks.start_soon(update, "engine-0", 5)
        tasks.start_soon(update, "engine-1", 9)
        await world.controller.wait_serving(version=2, count=1, timeout_s=100)
        assert anyio.current_time() == pytest.approx(6)
        await world.controller.wait_serving(version=2, timeout_s=100)
        assert anyio.current_time() == pytest.approx(10)


@virtual_time
async def test_wait_serving_gives_up_when_it_cannot_happen_any_more() -> None:
    async with running(2) as world:
        await world.controller.drain("engine-1")
        await world.controller.wait_serving(count=1, timeout_s=1)
        with pytest.raises(FleetDegraded, match="engine-1 Stopped: drained"):
            await world.controller.wait_serving(timeout_s=1000)


@virtual_time
async def test_versions_are_published_also_without_an_engine() -> None:
    async with running(1, restart_budget=0) as world:
        world.engine().exit(1)
        await world.until_state("Stopped")
        number = world.controller.reserve_version()
        world.controller.commit_version(version(number))
        assert world.log.of(VersionPublished)[-1] == VersionPublished(version(2))
        with pytest.raises(VersionRegression):
            world.controller.commit_version(version(2))
        assert len(world.log.of(VersionPublished)) == 2


@virtual_time
async def test_messages_from_an_earlier_life_are_dropped_and_counted() -> None:
    """Guards Fleet.current in each of the calls."""
    async with running(1) as world:
        old = world.now().incarnation
        await world.controller.restart("engine-0")
        controller = world.controller
        with pytest.raises(StaleIncarnation) as caught:
            controller.fail("engine-0", old, "late news")
        assert (caught.value.incarnation, caught.value.current) == (old, "e0-0002-ab12")
        with pytest.raises(StaleIncarnation):
            controller.admit("engine-0", old, version(1))
        with pytest.raises(StaleIncarnation):
            controller.engine("engine-0", old)
        with pytest.raises(StaleIncarnation):
            async with controller.updating("engine-0", old, version(1)):
                pass
        assert world.now().state == "Serving"
        assert controller.statistics().stale_messages_dropped == 4
        dropped = world.log.of(StaleMessageDropped)
        assert [event.incarnation for event in dropped] == [old] * 4
        assert len({event.message for event in dropped}) == 4


@virtual_time
async def test_a_life_that_was_given_up_cannot_be_admitted_or_used() -> None:
    async with running(1, admit=False, restart_backoff_s=9) as world:
        snapshot = await world.until_state("Syncing")
        assert world.controller.engine("engine-0", snapshot.incarnation) is world.engine()
        world.controller.fail("engine-0", snapshot.incarnation, "no votes")
        world.controller.fail("engine-0", snapshot.incarnation, "told twice")
        with pytest.raises(StaleIncarnation):
            world.controller.admit("engine-0", snapshot.incarnation, version(1))
        with pytest.raises(StaleIncarnation):
            world.controller.engine("engine-0", snapshot.incarnation)
        assert world.now().reason == "no votes"


@virtual_time
async def test_a_launching_engine_has_no_port_yet() -> None:
    async with running(1, admit=False, launcher=FakeLauncher(launch_s=5)) as world:
        with pytest.raises(StaleIncarnation):
            world.controller.engine("engine-0", world.now().incarnation)


@virtual_time
async def test_admission_needs_a_published_version_and_happens_once() -> None:
    async with running(1, admit=False) as world:
        snapshot = await world.until_state("Syncing")
        with pytest.raises(VersionRegression):
            world.controller.admit("engine-0", snapshot.incarnation, version(5))
        assert world.now().state == "Syncing"
        world.controller.admit("engine-0", snapshot.incarnation, version(1))
        with pytest.raises(IllegalTransition):
            world.controller.admit("engine-0", snapshot.incarnation, version(1))
        assert world.now().state == "Serving"


# -- the way out


@virtual_time
async def test_leaving_stops_every_engine_and_ends_the_subscriptions() -> None:
    async with running(3) as world, world.controller.bus.subscribe("listener") as events:
        pass
    assert world.launcher.alive() == []
    assert all(each.state == "Stopped" for each in world.controller.snapshot())
    assert [event async for event in events] == []


@virtual_time
async def test_an_error_in_the_body_stops_every_engine_and_leaves_as_it_is() -> None:
    launcher = FakeLauncher()
    with pytest.raises(ValueError, match="the caller's own"):
        async with make_controller(launcher, count=2, needs_weights=False) as controller:
            await controller.wait_serving(timeout_s=1)
            raise ValueError("the caller's own")
    assert len(launcher.engines) == 2
    assert launcher.alive() == []


@virtual_time
async def test_cancellation_stops_every_engine_within_its_grace() -> None:
    """Guards the shield in EngineSupervisor._stop: without it a cancelled driver leaves processes behind."""
    launcher = FakeLauncher()
    with anyio.move_on_after(10) as scope:
        async with make_controller(launcher, count=3, needs_weights=False) as controller:
            await controller.wait_serving(timeout_s=1)
            for engine in launcher.engines:
                slow_to_stop(engine, 4)
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert launcher.alive() == []
    assert anyio.current_time() == pytest.approx(14)  # side by side, not one after the other


def slow_to_stop(engine: FakeEngine, seconds: float) -> None:
    stop = engine.stop

    async def slow(grace_s: float) -> None:
        await anyio.sleep(seconds)
        await stop(grace_s)

    engine.stop = slow  # type: ignore[method-assign]


@virtual_time
async def test_leaving_while_engines_launch_fail_sync_and_drain() -> None:
    class Slow(FakeLauncher):
        async def launch(self, spec: LaunchSpec) -> FakeEngine:
            self.launch_s = 100 if spec.engine == "engine-0" else 0
            return await super().launch(spec)

    launcher = Slow()
    async with running(4, admit=False, launcher=launcher) as world, anyio.create_task_group() as tasks:
        await world.until_state("Syncing", "engine-3")
        for engine in ("engine-2", "engine-3"):
            world.controller.admit(engine, world.now(engine).incarnation, version(1))
        world.controller.fail("engine-1", world.now("engine-1").incarnation, "no votes")
        tasks.start_soon(hold, world)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(drain_until_closed, world)
        await world.until_state("Draining", "engine-2")
        states = [each.state for each in world.controller.snapshot()]
        assert states == ["Launching", "Failed", "Draining", "Serving"]
        tasks.cancel_scope.cancel()
    assert launcher.alive() == []
    assert all(each.state == "Stopped" for each in world.controller.snapshot())


async def hold(world: World) -> None:
    async with world.controller.lease(timeout_s=1):
        await anyio.sleep_forever()


async def drain_until_closed(world: World) -> None:
    await world.controller.drain("engine-2")


@virtual_time
async def test_an_unforeseen_error_in_a_supervisor_is_not_swallowed() -> None:
    """Guards against a broad except around the supervisor: a bug ends the controller, and still stops the engines."""

    class Broken(FakeLauncher):
        async def launch(self, spec: LaunchSpec) -> FakeEngine:
            engine = await super().launch(spec)
            if spec.engine == "engine-1" and len(self.lives("engine-1")) == 2:
                raise ZeroDivisionError("a bug")
            return engine

    launcher = Broken()
    with pytest.raises(ExceptionGroup) as caught:
        async with make_controller(launcher, count=2, needs_weights=False) as controller:
            await controller.wait_serving(timeout_s=1)
            launcher.newest("engine-1").exit(1)
            await anyio.sleep_forever()
    assert caught.group_contains(ZeroDivisionError)
    assert not launcher.newest("engine-0").alive


@virtual_time
async def test_an_event_sink_that_fails_ends_the_controller() -> None:
    """A run whose events.jsonl cannot be written must not go on as if nothing were wrong."""
    controller = make_controller(FakeLauncher(), count=1, needs_weights=False)

    def full_disk(_now: float, event: Event) -> None:
        if isinstance(event, VersionPublished):
            raise OSError("no space left")

    log = EventLog()
    controller.bus.add_sink(full_disk)
    controller.bus.add_sink(log)
    with pytest.raises(ExceptionGroup) as caught:
        async with controller:
            await controller.wait_serving(timeout_s=1)
            controller.commit_version(version(1))
            await anyio.sleep_forever()
    assert caught.group_contains(OSError, match="no space left")
    assert log.states("engine-0")[-1] == "Stopped"


@virtual_time
async def test_restart_hears_when_the_controller_closes() -> None:
    errors: list[str] = []
    async with anyio.create_task_group() as tasks, running(1, launcher=FakeLauncher(launch_s=20)) as world:

        async def restart() -> None:
            try:
                await world.controller.restart("engine-0")
            except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
                errors.append(str(error))

        tasks.start_soon(restart)
        await anyio.sleep(5)
    assert errors == ["engine-0 did not come back: the controller closed"]
