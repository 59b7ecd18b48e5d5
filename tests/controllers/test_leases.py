from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from controllers.errors import FleetDegraded, WaitTimeout
from controllers.events import EngineStateChanged, VersionProven
from controllers.lease import Lease
from tests.controllers.harness import World, running, version
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_a_lease_names_what_it_was_granted_on() -> None:
    async with running(1) as world, world.controller.lease(timeout_s=1) as lease:
        assert (lease.engine, lease.incarnation) == ("engine-0", "e0-0001-ab12")
        assert lease.url == world.engine().url
        assert lease.version == version(1)
        assert lease.cache_salt == "e0-0001-ab12:1"
        assert not lease.revoked.is_set()
        assert world.in_flight() == [1]


@virtual_time
async def test_o18_no_lease_before_the_proof() -> None:
    """Invariant 1 and 2, O18: an engine that answers but has proven nothing gets no request.

    Guards `takes_leases` in Fleet (Serving only).
    """
    async with running(1, admit=False) as world:
        snapshot = await world.until_state("Syncing")
        with pytest.raises(WaitTimeout, match="engine-0 Syncing"):
            async with world.controller.lease(timeout_s=5):
                raise AssertionError("leased an engine without weights")
        world.controller.admit("engine-0", snapshot.incarnation, version(1))
        async with world.controller.lease(timeout_s=5) as lease:
            assert lease.version == version(1)
        kinds = [type(event) for event in world.log.events if isinstance(event, VersionProven | EngineStateChanged)]
        assert kinds.index(VersionProven) == len(kinds) - 2  # the proof, then Serving


@virtual_time
async def test_o18_a_replacement_is_leased_only_at_the_version_of_the_day() -> None:
    """O18: the trainer is at version 12; the replacement of a killed engine gets no traffic before it proved 12."""
    async with running(1, restart_backoff_s=1) as world:
        for number in range(2, 13):
            world.controller.commit_version(version(number))
        world.engine().exit(-9)
        await world.until_state("Failed")
        async with world.controller.lease(timeout_s=60) as lease:
            assert lease.incarnation == "e0-0002-ab12"
            assert lease.version == version(12)


@virtual_time
async def test_leases_go_to_the_least_loaded_and_stop_at_the_concurrency() -> None:
    async with running(3, max_concurrency=2) as world, AsyncExitStack() as held:
        for _ in range(6):
            await held.enter_async_context(world.controller.lease(timeout_s=1))
        assert world.in_flight() == [2, 2, 2]
        with pytest.raises(WaitTimeout) as caught:
            await held.enter_async_context(world.controller.lease(timeout_s=1))
        assert caught.value.waited_for == "a free slot on a serving engine"
        assert world.controller.statistics().leases_held == 6
        assert world.controller.statistics().leases_waiting == 0
    assert world.in_flight() == [0, 0, 0]


@virtual_time
async def test_sticky_leases_meet_on_one_engine() -> None:
    async with running(4) as world, AsyncExitStack() as held:
        leases = [await held.enter_async_context(world.controller.lease(sticky="g7", timeout_s=1)) for _ in range(9)]
        assert len({lease.engine for lease in leases}) == 1


@virtual_time
async def test_waiters_are_served_in_the_order_they_came() -> None:
    """Guards the order of `_waiters` and that a newcomer never overtakes (LeaseDesk)."""
    order: list[int] = []
    async with running(1, max_concurrency=1) as world:

        async def ask(number: int) -> None:
            async with world.controller.lease(timeout_s=1000):
                order.append(number)
                await anyio.sleep(10)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(ask, number)
                await anyio.sleep(3)
    assert order == list(range(6))


@virtual_time
async def test_a_waiter_that_cannot_use_a_slot_does_not_block_the_ones_behind_it() -> None:
    got: list[str] = []
    async with running(2, max_concurrency=1) as world, AsyncExitStack() as held:
        leases = [await held.enter_async_context(world.controller.lease(timeout_s=1)) for _ in range(2)]

        async def ask(name: str, exclude: frozenset[str]) -> None:
            async with world.controller.lease(exclude=exclude, timeout_s=100) as lease:
                got.append(f"{name} on {lease.engine}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "picky", frozenset({"engine-0"}))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(ask, "easy", frozenset[str]())
            await anyio.wait_all_tasks_blocked()
            leases[0].release()
            await anyio.wait_all_tasks_blocked()
            assert got == ["easy on engine-0"]
            leases[1].release()
    assert got == ["easy on engine-0", "picky on engine-1"]


@virtual_time
async def test_excluded_engines_are_avoided_only_while_another_may_serve() -> None:
    async with running(2) as world:
        async with world.controller.lease(exclude=frozenset({"engine-0"}), timeout_s=1) as lease:
            assert lease.engine == "engine-1"
        both = frozenset({"engine-0", "engine-1"})
        async with world.controller.lease(exclude=both, timeout_s=1) as lease:
            assert lease.engine == "engine-0"
        await world.controller.drain("engine-1")
        async with world.controller.lease(exclude=frozenset({"engine-0"}), timeout_s=1) as lease:
            assert lease.engine == "engine-0"


@virtual_time
async def test_o19_a_late_release_never_touches_the_next_life() -> None:
    """O19: the engine is taken out with a request in flight and comes back; the old request finishes afterwards.

    Guards `Life.in_flight` (counts per incarnation) and the single use of Lease._give_back.
    """
    async with running(1, drain_timeout_s=1) as world:
        async with AsyncExitStack() as old:
            lease = await old.enter_async_context(world.controller.lease(timeout_s=1))
            await world.controller.restart("engine-0")
            assert lease.incarnation == "e0-0001-ab12"
            assert world.now().incarnation == "e0-0002-ab12"
            assert world.in_flight() == [0]
            async with world.controller.lease(timeout_s=1):
                assert world.in_flight() == [1]
                lease.release()
                lease.release()
                assert world.in_flight() == [1]
        assert world.in_flight() == [0]
        assert world.controller.statistics().leases_held == 0
        assert world.now().state == "Serving"


@virtual_time
async def test_release_is_idempotent() -> None:
    """Guards `_give_back = None` in Lease.release."""
    async with running(1) as world:
        async with world.controller.lease(timeout_s=1), world.controller.lease(timeout_s=1) as lease:
            lease.release()
            lease.release()
            assert world.in_flight() == [1]
        assert world.in_flight() == [0]


@virtual_time
async def test_a_slot_granted_to_a_waiter_in_the_moment_of_its_cancellation_is_given_back() -> None:
    """Guards the `except BaseException` in LeaseDesk.acquire: without it the slot is lost for ever."""
    async with running(1, max_concurrency=1) as world:

        async def ask() -> None:
            async with world.controller.lease(timeout_s=100):
                raise AssertionError("cancelled before it could run")

        async with AsyncExitStack() as held, anyio.create_task_group() as tasks:
            lease = await held.enter_async_context(world.controller.lease(timeout_s=1))
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            lease.release()  # grants the slot to the waiter, whose cancellation is on its way
        assert world.in_flight() == [0]
        async with world.controller.lease(timeout_s=1):
            pass


@virtual_time
async def test_waiters_hear_when_nothing_will_ever_serve_again() -> None:
    """Guards `_hopeless` in LeaseDesk: no endless silent wait."""
    async with running(1, max_concurrency=1, drain_timeout_s=0) as world, world.controller.lease(timeout_s=1):
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(FleetDegraded, match="stopped for good"):
                    async with world.controller.lease(timeout_s=1e5):
                        pass

            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await world.controller.drain("engine-0")
        assert anyio.current_time() < 100
        with pytest.raises(FleetDegraded):
            async with world.controller.lease(timeout_s=1e5):
                pass


@virtual_time
async def test_waiters_hear_when_the_controller_closes() -> None:
    async with anyio.create_task_group() as tasks, running(1, admit=False) as world:

        async def ask() -> None:
            with pytest.raises(FleetDegraded, match="the controller is closed"):
                async with world.controller.lease(timeout_s=1e5):
                    pass

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()


@virtual_time
async def test_leases_asked_for_during_an_update_wait_for_its_end() -> None:
    """Guards `takes_leases` (Updating is available, yet takes none)."""
    async with running(1) as world:
        world.controller.commit_version(version(2))
        got: list[Lease] = []

        async def ask() -> None:
            async with world.controller.lease(timeout_s=100) as lease:
                got.append(lease)

        async with (
            anyio.create_task_group() as tasks,
            world.controller.updating("engine-0", world.now().incarnation, version(2)) as update,
        ):
            tasks.start_soon(ask)
            await anyio.sleep(30)
            assert not got
            update.prove()
        assert [lease.version for lease in got] == [version(2)]


@virtual_time
async def test_a_crash_revokes_the_leases_at_once() -> None:
    async with running(1) as world, world.controller.lease(timeout_s=1) as lease:
        world.engine().exit(-9, "killed")
        with anyio.fail_after(1):
            await lease.revoked.wait()
        assert lease.revoked.reason is not None
        assert "killed" in lease.revoked.reason
        assert lease.revoked.deadline == anyio.current_time()


async def churn(world: World, holders: int, rounds: int) -> None:
    async def holder() -> None:
        for _ in range(rounds):
            async with world.controller.lease(timeout_s=1000) as lease:
                with anyio.move_on_after(7):
                    await lease.revoked.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(holders):
            tasks.start_soon(holder)


@virtual_time
async def test_slots_add_up_after_crashes_and_restarts_under_load() -> None:
    async with running(3, max_concurrency=2, restart_budget=99) as world, anyio.create_task_group() as tasks:
        tasks.start_soon(churn, world, 9, 20)
        for _ in range(5):
            await anyio.sleep(11)
            world.engine("engine-1").exit(-9)
            await world.controller.restart("engine-0")
            await world.until_state("Serving", "engine-1")
    statistics = world.controller.statistics()
    assert statistics.leases_granted == 180
    assert (statistics.leases_held, statistics.leases_waiting) == (0, 0)
    assert world.in_flight() == [0, 0, 0]
    assert (statistics.restarts_planned, statistics.restarts_crash) == (5, 5)


@virtual_time
async def test_a_lease_granted_just_before_an_update_begins_is_taken_back_and_granted_after_it() -> None:
    """Invariant 1. Guards `_holds` in LeaseDesk: the waiter runs a turn after the grant, and the engine has paused."""
    async with running(1, max_concurrency=1) as world, anyio.create_task_group() as tasks:
        world.controller.commit_version(version(2))
        first = AsyncExitStack()
        await first.enter_async_context(world.controller.lease(timeout_s=1))

        got: list[Lease] = []

        async def ask() -> None:
            async with world.controller.lease(timeout_s=100) as lease:
                assert world.now().state == "Serving"
                got.append(lease)

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await first.aclose()  # grants the slot; nobody else has had a turn yet
        async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
            await anyio.sleep(5)
            assert world.in_flight() == [0]
            update.prove()
        await anyio.wait_all_tasks_blocked()
        assert [lease.version for lease in got] == [version(2)]
