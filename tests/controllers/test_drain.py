from __future__ import annotations

import anyio
import pytest

from controllers.errors import EngineFailed, EngineUnreachable, WaitTimeout
from controllers.events import EngineExited
from controllers.lease import Lease
from tests.controllers.harness import World, about, running, version
from tests.support.virtual_time import virtual_time


async def hold_until_revoked(world: World, held: list[Lease], linger_s: float = 0.0) -> None:
    async with world.controller.lease(timeout_s=10) as lease:
        held.append(lease)
        await lease.revoked.wait()
        await anyio.sleep(linger_s)


@virtual_time
async def test_a_drain_revokes_leases_and_goes_on_as_soon_as_they_are_back() -> None:
    async with running(1, drain_timeout_s=30) as world, anyio.create_task_group() as tasks:
        held: list[Lease] = []
        tasks.start_soon(hold_until_revoked, world, held, 4)
        tasks.start_soon(hold_until_revoked, world, held, 7)
        await anyio.wait_all_tasks_blocked()
        engine = world.engine()
        tasks.start_soon(world.controller.drain, "engine-0")
        await world.until_state("Draining")
        assert held[0].revoked.deadline == about(30)
        assert held[0].revoked.reason == "drain to stop"
        await world.until_state("Stopped")
        assert anyio.current_time() == about(7)
        assert engine.called("abort_all") == 0
        assert world.log.states("engine-0")[-2:] == ["Draining", "Stopped"]
        assert [each.expected for each in world.log.of(EngineExited)] == [True]


@virtual_time
async def test_no_lease_is_granted_while_draining() -> None:
    """Guards `takes_leases` and Member.closing."""
    async with running(1, drain_timeout_s=30) as world, anyio.create_task_group() as tasks:
        held: list[Lease] = []
        tasks.start_soon(hold_until_revoked, world, held, 20)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(world.controller.drain, "engine-0")
        await world.until_state("Draining")
        with pytest.raises(WaitTimeout, match="engine-0 Draining"):
            async with world.controller.lease(timeout_s=5):
                pass


@virtual_time
async def test_an_engine_asked_to_drain_gets_no_lease_in_the_turn_before_it_drains() -> None:
    """Guards `closing` in Member.takes_leases: the lease would be revoked as soon as it is granted."""
    async with running(2) as world, anyio.create_task_group() as tasks:
        got: list[str] = []

        async def ask() -> None:
            async with world.controller.lease(timeout_s=1) as lease:
                got.append(lease.engine)

        tasks.start_soon(world.controller.drain, "engine-0")
        tasks.start_soon(ask)
        await world.until_state("Stopped")
        assert got == ["engine-1"]


@virtual_time
async def test_at_the_deadline_the_controller_aborts_what_is_left() -> None:
    """Guards abort_all in EngineSupervisor._drain."""
    async with running(1) as world, anyio.create_task_group() as tasks:
        engine = world.engine()
        aborted = anyio.Event()
        engine.running.add("r-1")
        engine.on_abort = lambda _request_id: aborted.set()

        async def stubborn() -> None:
            async with world.controller.lease(timeout_s=1):
                await aborted.wait()

        tasks.start_soon(stubborn)
        await anyio.wait_all_tasks_blocked()
        await world.controller.drain("engine-0", timeout_s=12)
        assert anyio.current_time() == about(12)
        assert [call[0] for call in engine.calls] == ["abort_all", "stop"]


@virtual_time
async def test_a_holder_that_never_lets_go_and_an_engine_that_cannot_abort_do_not_stop_a_drain() -> None:
    async with running(1) as world, world.controller.lease(timeout_s=1):
        world.engine().refuse("abort_all", EngineUnreachable("connection reset"))
        await world.controller.drain("engine-0", timeout_s=12)
        assert anyio.current_time() < 20
        assert world.now().state == "Stopped"


@virtual_time
async def test_an_engine_that_dies_while_it_drains_is_restarted_without_cost() -> None:
    async with running(1, restart_budget=0, drain_timeout_s=30) as world, anyio.create_task_group() as tasks:
        held: list[Lease] = []
        tasks.start_soon(hold_until_revoked, world, held, 25)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(world.controller.restart, "engine-0")
        await world.until_state("Draining")
        await anyio.sleep(3)
        world.engine().exit(-9)
        await world.until_state("Serving")
        assert anyio.current_time() == about(3)
        assert held[0].revoked.deadline == about(3)
        assert world.log.states("engine-0")[-5:] == ["Draining", "Failed", "Launching", "Syncing", "Serving"]


@virtual_time
async def test_an_updating_engine_finishes_its_update_first_and_takes_no_further_one() -> None:
    """Guards the wait for Updating in EngineSupervisor._drain, and `closing` in WeightUpdates._until_serving."""
    async with running(1) as world, anyio.create_task_group() as tasks:
        world.controller.commit_version(version(2))
        incarnation = world.now().incarnation
        async with world.controller.updating("engine-0", incarnation, version(2)) as update:
            tasks.start_soon(world.controller.restart, "engine-0")
            await anyio.sleep(9)
            assert world.now().state == "Updating"
            with pytest.raises(EngineFailed, match="asked to drain"):
                async with world.controller.updating("engine-0", incarnation, version(2)):
                    pass
            update.prove()
        await world.until_state("Draining")
        await world.until_state("Serving")
        states = world.log.states("engine-0")
        assert states[3:] == ["Updating", "Serving", "Draining", "Launching", "Syncing", "Serving"]
        assert world.controller.statistics().leases_granted == 0


@virtual_time
async def test_an_update_that_never_ends_cannot_hold_a_drain_for_ever() -> None:
    async with running(1, sync_timeout_s=40) as world:
        world.controller.commit_version(version(2))
        with pytest.raises(EngineFailed):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                with anyio.CancelScope(shield=True):  # a body that does not even heed its own deadline
                    await world.controller.restart("engine-0")
                assert anyio.current_time() == about(40)
                assert not update.proved


@virtual_time
async def test_a_drain_of_an_engine_that_is_still_syncing_is_immediate() -> None:
    async with running(1, admit=False) as world:
        await world.until_state("Syncing")
        await world.controller.drain("engine-0")
        assert world.log.states("engine-0") == ["Launching", "Syncing", "Draining", "Stopped"]
        assert anyio.current_time() == 0


@virtual_time
async def test_a_drain_overtakes_a_restart_and_a_stopped_engine_can_be_drained_again() -> None:
    async with running(1, drain_timeout_s=30) as world, anyio.create_task_group() as tasks:
        held: list[Lease] = []
        tasks.start_soon(hold_until_revoked, world, held, 10)
        await anyio.wait_all_tasks_blocked()

        async def restart() -> None:
            with pytest.raises(EngineFailed, match="overtaken by stop"):
                await world.controller.restart("engine-0")

        tasks.start_soon(restart)
        await world.until_state("Draining")
        await world.controller.drain("engine-0")
        assert world.now().state == "Stopped"
        await world.controller.drain("engine-0")
        assert len(world.launcher.specs) == 1
