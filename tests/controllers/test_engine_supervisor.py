from __future__ import annotations

import anyio
import pytest

from controllers.errors import ConfigError, EngineFailed, FleetDegraded, LaunchFailed
from controllers.events import EngineExited, EngineLaunched, EngineRestarted
from controllers.inference_controller import FleetOptions, InferenceController
from controllers.ports import EngineHealth
from controllers.weight_versions import MemoryLedgerStore, VersionLedger
from tests.controllers.harness import NO_HEALTH, running, version
from tests.fakes.launcher import FakeLauncher
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_the_first_life_in_events() -> None:
    async with running(1) as world:
        assert world.log.states("engine-0") == ["Launching", "Syncing", "Serving"]
        [launched] = world.log.of(EngineLaunched)
        assert (launched.url, launched.pid, launched.ranks) == (world.engine().url, 1000, 1)
        [spec] = world.launcher.specs
        assert spec.weight_version == f"{spec.incarnation}:none"
        assert world.log.of(EngineRestarted) == []


@virtual_time
async def test_incarnation_ids_are_unique_of_one_length_and_none_is_a_prefix() -> None:
    async with running(11) as world:
        for engine in ("engine-1", "engine-10"):
            await world.controller.restart(engine)
        ids = [spec.incarnation for spec in world.launcher.specs]
        assert len(set(ids)) == 13
        assert len({len(each) for each in ids}) == 1


@virtual_time
async def test_a_crash_brings_a_new_life_after_the_backoff() -> None:
    async with running(2, restart_backoff_s=4) as world:
        world.engine("engine-1").exit(-9, "out of memory")
        await world.until_state("Failed", "engine-1")
        failed_at = anyio.current_time()
        assert "out of memory" in str(world.now("engine-1").reason)
        after = await world.until_state("Serving", "engine-1")
        assert anyio.current_time() - failed_at == pytest.approx(4)
        assert after.incarnation == "e1-0002-ab12"
        assert world.log.of(EngineExited)[0].expected is False
        assert world.log.of(EngineRestarted) == [EngineRestarted("engine-1", "e1-0002-ab12", planned=False, restarts=1)]
        assert world.now("engine-0").state == "Serving"
        assert world.now("engine-0").restarts == 0


@virtual_time
async def test_backoff_doubles_and_starts_afresh_once_the_engine_has_served() -> None:
    launcher = FakeLauncher()
    async with running(1, launcher=launcher, restart_backoff_s=1, restart_budget=9) as world:
        launcher.fail_next("engine-0", LaunchFailed("no GPU"), times=3)
        world.engine().exit(1)
        await world.until_state("Failed")
        await world.until_state("Serving")
        assert world.log.times("engine-0", "Launching") == pytest.approx([0, 1, 3, 7, 15])
        world.engine().exit(1)
        await world.until_state("Failed")
        await world.until_state("Serving")
        assert world.log.times("engine-0", "Launching")[-1] == pytest.approx(16)


@virtual_time
async def test_out_of_budget_the_engine_stops_for_good_and_says_why() -> None:
    """Guards the comparison with restart_budget in EngineSupervisor._until_next_life."""
    launcher = FakeLauncher()
    launcher.fail_next("engine-0", LaunchFailed("CUDA error 35"), times=99)
    async with running(1, launcher=launcher, serving=False, restart_budget=3) as world:
        with pytest.raises(FleetDegraded, match=r"out of restart budget \(3\).*CUDA error 35"):
            await world.controller.wait_serving(timeout_s=1000)
        assert len(launcher.specs) == 4
        assert world.now().state == "Stopped"


@virtual_time
async def test_planned_restarts_cost_no_budget() -> None:
    async with running(1, restart_budget=0) as world:
        for _ in range(4):
            await world.controller.restart("engine-0")
        assert world.now().restarts == 4
        world.engine().exit(1)
        await world.until_state("Stopped")


@virtual_time
async def test_a_restart_ordered_on_a_stopped_engine_gives_it_a_fresh_budget() -> None:
    async with running(1, restart_budget=1) as world:
        for _ in range(2):
            world.engine().exit(1)
            await world.until_state("Failed")
            if world.controller.statistics().restarts_crash < 1:
                await world.until_state("Serving")
        await world.until_state("Stopped")
        await world.controller.restart("engine-0")
        world.engine().exit(1)
        await world.until_state("Failed")
        await world.until_state("Serving")


@virtual_time
async def test_one_engine_out_of_budget_leaves_the_others_alone() -> None:
    async with running(3, restart_budget=0) as world:
        world.engine("engine-1").exit(1)
        await world.until_state("Stopped", "engine-1")
        assert [each.state for each in world.controller.snapshot()] == ["Serving", "Stopped", "Serving"]
        async with world.controller.lease(timeout_s=1):
            pass


@virtual_time
async def test_a_launch_that_hangs_is_given_up_and_tried_again() -> None:
    """Guards fail_after in EngineSupervisor._launch."""
    launcher = FakeLauncher()
    launcher.hang()
    async with running(1, launcher=launcher, serving=False, launch_timeout_s=50) as world:
        snapshot = await world.until_state("Failed")
        assert anyio.current_time() == pytest.approx(50)
        assert snapshot.reason == "did not come up within 50 s"
        launcher.release()
        await world.until_state("Serving")


@virtual_time
async def test_an_engine_nobody_brings_weights_is_failed_at_the_sync_deadline() -> None:
    """Guards EngineSupervisor._watch_sync."""
    async with running(1, admit=False, sync_timeout_s=20) as world:
        await world.until_state("Syncing")
        first = world.engine()
        snapshot = await world.until_state("Failed")
        assert anyio.current_time() == pytest.approx(20)
        assert snapshot.reason == "proved no weights within 20 s"
        await world.until_state("Syncing")
        assert not first.alive


@virtual_time
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_late_first_publication_fails_no_engine(resumed: bool) -> None:
    """Guards the first line of EngineSupervisor._watch_sync; of a resumed run too, whose ledger has an old version."""
    store = MemoryLedgerStore()
    if resumed:
        store.commit(version(store.reserve()))
    controller = InferenceController(
        FakeLauncher(), VersionLedger(store), FleetOptions(1, sync_timeout_s=20, health=NO_HEALTH), run_id="ab12"
    )
    async with controller:
        await anyio.sleep(200)
        [engine] = controller.snapshot()
        assert (engine.state, engine.incarnation) == ("Syncing", "e0-0001-ab12")
        first = version(controller.reserve_version())
        controller.commit_version(first)
        await anyio.sleep(19)
        controller.admit(engine.engine, engine.incarnation, first)
        await anyio.sleep(100)
        assert controller.snapshot()[0].state == "Serving"


@virtual_time
async def test_a_life_that_is_failed_as_its_launch_ends_is_replaced() -> None:
    """Guards the look at the state in EngineSupervisor._serve: Failed -> Syncing would end the supervisor."""
    launcher = FakeLauncher()
    launcher.hang()
    async with running(1, launcher=launcher, serving=False) as world:
        await anyio.sleep(1)
        launcher.release()
        world.controller.fail("engine-0", world.now().incarnation, "a plugin gave it up")
        await world.until_state("Serving")
        assert world.now().incarnation == "e0-0002-ab12"
        assert not launcher.engines[0].alive


@virtual_time
async def test_a_stop_that_times_out_does_not_end_the_supervisor() -> None:
    """Guards TimeoutError in EngineSupervisor._stop."""
    async with running(1) as world:
        old = world.engine()

        async def stop(grace_s: float) -> None:
            raise TimeoutError

        old.stop = stop  # type: ignore[method-assign]
        world.controller.fail("engine-0", old.incarnation, "bad votes")
        await world.until_state("Serving")
        assert world.engine() is not old


@virtual_time
async def test_an_admitted_engine_outlives_the_sync_deadline() -> None:
    async with running(1, sync_timeout_s=20) as world:
        await anyio.sleep(100)
        assert world.now().incarnation == "e0-0001-ab12"
        assert world.now().state == "Serving"


@virtual_time
async def test_the_old_process_has_ended_before_a_new_life_begins() -> None:
    """Guards the `finally` in EngineSupervisor._live: two lives would share GPUs and ports."""
    async with running(1, restart_backoff_s=0) as world:
        old = world.engine()
        old.hang("stop")
        world.controller.fail("engine-0", old.incarnation, "a plugin gave it up")
        assert world.now().state == "Failed"
        await anyio.sleep(3)
        assert len(world.launcher.specs) == 1
        old.release("stop")
        await world.until_state("Serving")
        assert world.log.of(EngineExited) == [EngineExited("engine-0", old.incarnation, -15, "stopped", expected=True)]


@virtual_time
async def test_a_process_that_will_not_end_does_not_hold_the_engine_for_ever() -> None:
    async with running(1, stop_grace_s=5) as world:
        old = world.engine()
        old.hang("stop")
        world.controller.fail("engine-0", old.incarnation, "stuck")
        await world.until_state("Serving")
        assert anyio.current_time() < 30


@virtual_time
async def test_a_failed_engine_gets_no_lease_in_the_same_turn() -> None:
    async with running(1) as world:
        world.controller.fail("engine-0", world.now().incarnation, "bad votes")
        async with world.controller.lease(timeout_s=60) as lease:
            assert lease.incarnation == "e0-0002-ab12"


@virtual_time
async def test_restart_while_launching_starts_over_at_once() -> None:
    launcher = FakeLauncher()
    launcher.hang()
    async with running(1, launcher=launcher, serving=False) as world, anyio.create_task_group() as tasks:
        await anyio.sleep(1)
        tasks.start_soon(world.controller.restart, "engine-0")
        await anyio.wait_all_tasks_blocked()
        assert len(launcher.specs) == 2
        launcher.release()
        await world.until_state("Serving")
    assert len(launcher.engines) == 1


@virtual_time
async def test_restart_while_backing_off_starts_at_once() -> None:
    async with running(1, restart_backoff_s=50) as world:
        world.engine().exit(1)
        await world.until_state("Failed")
        await world.controller.restart("engine-0")
        assert anyio.current_time() < 1


@virtual_time
async def test_restart_before_the_supervisor_had_its_first_turn() -> None:
    async with running(1, serving=False) as world:
        await world.controller.restart("engine-0")
        assert world.now().state == "Serving"


@virtual_time
async def test_restart_raises_when_the_engine_does_not_come_back() -> None:
    launcher = FakeLauncher()
    async with running(1, launcher=launcher, restart_budget=1) as world:
        launcher.fail_next("engine-0", LaunchFailed("port is taken"), times=9)
        with pytest.raises(EngineFailed, match="port is taken") as caught:
            await world.controller.restart("engine-0")
        assert caught.value.engine == "engine-0"


@virtual_time
async def test_a_new_life_that_crashes_once_is_retried_within_restart() -> None:
    launcher = FakeLauncher()
    async with running(1, launcher=launcher, restart_budget=1) as world:
        launcher.fail_next("engine-0", LaunchFailed("flaky"))
        await world.controller.restart("engine-0")
        assert world.now().state == "Serving"
        assert world.log.of(EngineRestarted) == [EngineRestarted("engine-0", "e0-0003-ab12", planned=False, restarts=2)]


@virtual_time
async def test_two_restarts_asked_for_together_are_one() -> None:
    async with running(1) as world, anyio.create_task_group() as tasks:
        tasks.start_soon(world.controller.restart, "engine-0")
        tasks.start_soon(world.controller.restart, "engine-0")
    assert len(world.launcher.specs) == 2


@virtual_time
async def test_an_unknown_engine_is_named() -> None:
    async with running(1) as world:
        with pytest.raises(ConfigError, match="'engine-7'"):
            await world.controller.restart("engine-7")


@virtual_time
async def test_engines_that_need_no_weights_serve_as_they_are() -> None:
    async with running(1, admit=False, needs_weights=False) as world:
        await world.controller.wait_serving(timeout_s=1)
        async with world.controller.lease(timeout_s=1) as lease:
            assert lease.version.number == 0
            assert lease.cache_salt == "e0-0001-ab12:0"


@virtual_time
async def test_an_external_engine_is_not_waited_for_after_its_stop() -> None:
    async with running(1) as world:
        engine = world.engine()
        engine.pid = 0
        engine.hang("stop")
        engine.release("stop")
        engine.health_script.append(EngineHealth(0, 0, "x"))
        await world.controller.drain("engine-0")
        assert world.log.of(EngineExited) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", 0),
        ("max_concurrency", 0),
        ("restart_budget", -1),
        ("max_unavailable", 0),
        ("restart_backoff_s", -1),
        ("drain_timeout_s", -0.5),
        ("stop_grace_s", -1),
        ("launch_timeout_s", 0),
        ("sync_timeout_s", 0),
    ],
)
def test_bad_options_name_the_key_and_the_value(key: str, value: float) -> None:
    options: dict[str, float] = {"count": 1, key: value}
    with pytest.raises(ConfigError, match=f"{key} .*{value}"):
        FleetOptions(**options)  # type: ignore[arg-type]


def test_version_helper_is_ordered() -> None:
    assert version(2).step == version(1).step + 1
