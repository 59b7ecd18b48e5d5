from __future__ import annotations

import anyio
import pytest

from controllers.errors import EngineFailed, StaleIncarnation, VersionRegression, WaitTimeout
from controllers.events import EngineStateChanged, StaleMessageDropped, VersionProven
from tests.controllers.harness import World, running, version
from tests.support.virtual_time import virtual_time


async def update_to(world: World, number: int, engine: str = "engine-0") -> None:
    async with world.controller.updating(engine, world.now(engine).incarnation, version(number)) as update:
        await update.engine.pause("in_place")
        update.prove()
        await update.engine.set_weight_version(f"{world.now(engine).incarnation}:{number}")
        await update.engine.resume()


@virtual_time
async def test_an_update_goes_from_one_proven_version_to_the_next() -> None:
    async with running(1) as world:
        world.controller.commit_version(version(2))
        await update_to(world, 2)
        assert world.now().version == 2
        assert world.engine().paused is None
        tail = [event for event in world.log.events if isinstance(event, VersionProven | EngineStateChanged)][-3:]
        assert [getattr(event, "state", "proof") for event in tail] == ["Updating", "proof", "Serving"]
        assert world.controller.ledger.proven("e0-0001-ab12") == version(2)


@virtual_time
async def test_invariant_5_an_exception_in_the_pause_ends_in_a_restart() -> None:
    """Invariant 5. Guards the `except BaseException` in WeightUpdates.updating."""
    async with running(1) as world:
        world.controller.commit_version(version(2))
        paused = world.engine()
        with pytest.raises(RuntimeError, match="half the votes"):
            async with world.controller.updating("engine-0", paused.incarnation, version(2)) as update:
                await update.engine.pause("in_place")
                raise RuntimeError("half the votes")
        assert world.now().state == "Failed"
        assert "half the votes" in str(world.now().reason)
        after = await world.until_state("Serving")
        assert (paused.alive, after.version) == (False, 2)


@virtual_time
async def test_invariant_5_cancellation_in_the_pause_ends_in_a_restart() -> None:
    async with running(1) as world:
        world.controller.commit_version(version(2))
        paused = world.engine()
        with anyio.move_on_after(5):
            async with world.controller.updating("engine-0", paused.incarnation, version(2)) as update:
                await update.engine.pause("in_place")
                await anyio.sleep_forever()
        assert world.now().state == "Failed"
        await world.until_state("Serving")
        assert not paused.alive


@virtual_time
async def test_invariant_5_an_exception_after_the_proof_still_ends_in_a_restart() -> None:
    """The proof says the weights are right, not that the engine was resumed."""
    async with running(1) as world:
        world.controller.commit_version(version(2))
        with pytest.raises(RuntimeError):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                update.prove()
                raise RuntimeError("resume failed")
        assert world.now().state == "Failed"


@virtual_time
async def test_invariant_2_leaving_without_a_proof_fails_the_engine() -> None:
    """Invariant 2. Guards `update.proved` in WeightUpdates.updating."""
    async with running(1) as world:
        world.controller.commit_version(version(2))
        async with world.controller.updating("engine-0", world.now().incarnation, version(2)):
            pass
        assert world.now().state == "Failed"
        assert "without a proof" in str(world.now().reason)


@virtual_time
async def test_a_version_that_was_never_published_cannot_be_proven() -> None:
    async with running(1) as world:
        with pytest.raises(VersionRegression, match="never published"):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                update.prove()
        assert world.now().state == "Failed"


@virtual_time
async def test_an_older_version_is_refused_before_the_pause() -> None:
    async with running(1) as world:
        world.controller.commit_version(version(2))
        await update_to(world, 2)
        with pytest.raises(VersionRegression, match="serves version 2"):
            async with world.controller.updating("engine-0", world.now().incarnation, version(1)):
                pass
        assert world.now().state == "Serving"


@virtual_time
async def test_an_engine_that_dies_in_the_pause_is_told_to_the_body_s_owner() -> None:
    async with running(1, restart_backoff_s=1) as world:
        world.controller.commit_version(version(2))
        with pytest.raises(EngineFailed, match="process ended"):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                update.prove()
                world.engine().exit(-9)
                await world.until_state("Failed")
        await world.until_state("Serving")


@virtual_time
async def test_a_proof_from_an_earlier_life_is_dropped_and_counted() -> None:
    """Guards Fleet.current in WeightUpdates._prove."""
    async with running(1, restart_backoff_s=1) as world:
        world.controller.commit_version(version(2))
        with pytest.raises(StaleIncarnation):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                world.engine().exit(-9)
                await world.until_state("Failed")
                await world.until_state("Serving")
                update.prove()
        assert world.now().state == "Serving"  # the new life does not pay for the old one
        assert [event.incarnation for event in world.log.of(StaleMessageDropped)] == ["e0-0001-ab12"]


@virtual_time
async def test_an_update_waits_for_admission_and_for_the_update_before_it() -> None:
    order: list[str] = []
    async with running(1, admit=False) as world, anyio.create_task_group() as tasks:
        snapshot = await world.until_state("Syncing")
        for number in (2, 3):
            world.controller.commit_version(version(number))

        async def update(number: int) -> None:
            async with world.controller.updating("engine-0", snapshot.incarnation, version(number)) as update:
                order.append(f"begin {number}")
                await anyio.sleep(5)
                update.prove()
                order.append(f"end {number}")

        tasks.start_soon(update, 2)
        await anyio.sleep(2)
        tasks.start_soon(update, 3)
        await anyio.sleep(2)
        assert order == []
        world.controller.admit("engine-0", snapshot.incarnation, version(1))
    assert order == ["begin 2", "end 2", "begin 3", "end 3"]


@virtual_time
async def test_an_update_that_waits_hears_when_its_engine_fails() -> None:
    """Guards the wait in WeightUpdates._until_serving: no endless wait for an engine that will not serve."""
    async with running(1, admit=False, sync_timeout_s=20) as world:
        snapshot = await world.until_state("Syncing")
        with pytest.raises(EngineFailed, match="proved no weights"):
            async with world.controller.updating("engine-0", snapshot.incarnation, version(1)):
                pass


@virtual_time
async def test_invariant_5_a_pause_that_does_not_end_is_cut_off_at_its_deadline() -> None:
    """Invariants 5 and 8. Guards move_on_after in WeightUpdates.updating: a hung plugin pauses no engine for ever."""
    async with running(1, sync_timeout_s=40) as world:
        world.controller.commit_version(version(2))
        with pytest.raises(WaitTimeout, match="e0-0001-ab12 to version 2"):
            async with world.controller.updating("engine-0", world.now().incarnation, version(2)) as update:
                await update.engine.pause("in_place")
                await anyio.sleep_forever()
        assert anyio.current_time() == pytest.approx(40)
        assert world.now().state == "Failed"
