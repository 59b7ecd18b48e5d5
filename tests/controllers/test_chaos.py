"""Everything at once, at random but repeatable: crashes, restarts, drains, updates, failures and leases."""

from __future__ import annotations

import random

import anyio
import pytest

from controllers.errors import MilesError
from controllers.events import EngineStateChanged, VersionProven
from tests.controllers.harness import World, running, version
from tests.fakes.launcher import FakeLauncher
from tests.support.virtual_time import virtual_time


@pytest.mark.parametrize("seed", range(8))
def test_invariants_hold_under_chaos(seed: int) -> None:
    """Invariants 1, 2, 3, 5 and 8 from the event log and the counts; every wait ends."""

    @virtual_time
    async def scenario() -> None:
        dice = random.Random(seed)
        launcher = FakeLauncher(launch_s=2)
        async with running(3, launcher=launcher, max_concurrency=2, restart_budget=10**6, drain_timeout_s=4) as world:
            with anyio.move_on_after(200):
                async with anyio.create_task_group() as tasks:
                    for _ in range(8):
                        tasks.start_soon(hold_leases, world, dice)
                    tasks.start_soon(update_all, world, dice)
                    tasks.start_soon(break_things, world, dice)
                    tasks.start_soon(operate, world, dice)
            for snapshot in world.controller.snapshot():
                await world.controller.restart(snapshot.engine)
            await world.controller.wait_serving(timeout_s=300)
            assert world.in_flight() == [0, 0, 0]
            statistics = world.controller.statistics()
            assert (statistics.leases_held, statistics.leases_waiting) == (0, 0)
            assert statistics.restarts_crash > 3
            assert all(engine.paused is None for engine in launcher.alive())
        assert launcher.alive() == []
        assert_served_only_what_was_proven(world)

    scenario()


def assert_served_only_what_was_proven(world: World) -> None:
    proven: dict[str, int] = {}
    for event in world.log.events:
        if isinstance(event, VersionProven):
            assert event.version.number >= proven.get(event.incarnation, 0)
            proven[event.incarnation] = event.version.number
        elif isinstance(event, EngineStateChanged) and event.state == "Serving":
            assert event.version == proven[event.incarnation]


async def hold_leases(world: World, dice: random.Random) -> None:
    while True:
        try:
            async with world.controller.lease(timeout_s=dice.choice([1, 30]), sticky=dice.choice([None, "k"])) as lease:
                snapshot = world.now(lease.engine)
                assert (snapshot.incarnation, snapshot.state) == (lease.incarnation, "Serving")
                assert world.controller.ledger.proven(lease.incarnation) == lease.version
                with anyio.move_on_after(dice.uniform(0, 6)):
                    await lease.revoked.wait()
                    await anyio.sleep(dice.choice([0, 0, 9]))
        except MilesError:
            await anyio.sleep(1)


async def update_all(world: World, dice: random.Random) -> None:
    number = 1
    while True:
        await anyio.sleep(dice.uniform(0, 9))
        number += 1
        world.controller.commit_version(version(number))
        async with anyio.create_task_group() as tasks:
            for snapshot in world.controller.snapshot():
                tasks.start_soon(update_one, world, dice, snapshot.engine, snapshot.incarnation, number)


async def update_one(world: World, dice: random.Random, engine: str, incarnation: str, number: int) -> None:
    try:
        async with world.controller.updating(engine, incarnation, version(number)) as update:
            await update.engine.pause("in_place")
            await anyio.sleep(dice.uniform(0, 2))
            if dice.random() < 0.1:
                return
            update.prove()
            await update.engine.resume()
    except MilesError:
        pass


async def break_things(world: World, dice: random.Random) -> None:
    while True:
        await anyio.sleep(dice.expovariate(1 / 12))
        alive = world.launcher.alive()
        if not alive:
            continue
        victim = dice.choice(alive)
        if dice.random() < 0.6:
            victim.exit(-9)
        elif world.now(victim.engine).incarnation == victim.incarnation:
            world.controller.fail(victim.engine, victim.incarnation, "a plugin gave it up")


async def operate(world: World, dice: random.Random) -> None:
    while True:
        await anyio.sleep(dice.expovariate(1 / 9))
        engine = f"engine-{dice.randrange(3)}"
        try:
            with anyio.move_on_after(dice.choice([1, 60])):
                match dice.randrange(3):
                    case 0:
                        await world.controller.rolling_restart()
                    case 1:
                        await world.controller.restart(engine)
                    case _:
                        await world.controller.drain(engine)
                        await world.controller.restart(engine)
        except MilesError:
            await bring_back_stopped(world)


async def bring_back_stopped(world: World) -> None:
    for snapshot in world.controller.snapshot():
        if snapshot.state == "Stopped":
            await world.controller.restart(snapshot.engine)
