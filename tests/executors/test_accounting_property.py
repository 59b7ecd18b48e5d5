"""Random faults, seeded: whatever happens to the fleet, every group is accounted for and every token is in place."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from pathlib import Path

import anyio
import pytest

from controllers.errors import EngineRejected
from executors.errors import RolloutFailed
from executors.trajectory import Batch
from tests.executors.world import Prompts, Slow, World, assert_bit_for_bit
from tests.fakes.sampling_client import AbortByEngine, Break, Fault, Hang, Mislabel, Refuse
from tests.support.virtual_time import virtual_time

STEPS = 10


class Chaos:
    """Does one random thing to the fleet at a time, and always leaves an engine serving."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._starts = 0
        self._away: list[str] = []

    async def run(self) -> None:
        while True:
            await anyio.sleep(self._random.uniform(0.1, 6.0))
            self._random.choice([self._fault, self._fault, self._fault, self._kill, self._drain, self._start])()
            self._world.assert_accounted()

    def reward(self) -> object:
        draw = self._random.random()
        if draw < 0.03:
            return Slow(10)
        if draw < 0.06:
            return ValueError("verifier bug")
        return None if draw < 0.2 else float(self._random.random() < 0.5)

    def _engine(self) -> str:
        return self._random.choice(sorted(self._world.leases.serving))

    def _fault(self) -> None:
        after = self._random.randrange(0, 9)
        faults: list[Fault] = [
            Break(after),
            Hang(after),
            AbortByEngine(after),
            Mislabel("nobody:1"),
            Refuse(EngineRejected("busy", status=503)),
            Refuse(EngineRejected("no", status=422)),
        ]
        self._world.server(self._engine()).faults.append(self._random.choice(faults))

    def _kill(self) -> None:
        if len(self._world.leases.serving) > 1:
            engine = self._engine()
            self._world.kill(engine)
            self._away.append(engine)

    def _drain(self) -> None:
        if len(self._world.leases.serving) > 1:
            engine = self._engine()
            self._world.leases.drain(engine, grace_s=self._random.uniform(0.0, 5.0))
            self._away.append(engine)

    def _start(self) -> None:
        if self._away:
            self._starts += 1
            engine = self._away.pop(0)
            newest = max(life.version.number for life in self._world.leases.serving.values())
            self._world.start(engine, f"{engine}.r{self._starts}", version=newest)


def check_batch(world: World, batch: Batch) -> None:
    for group, staleness in zip(batch.groups, batch.staleness, strict=True):
        assert 0 <= staleness <= (world.options.max_staleness or 0)
        assert len(group.trajectories) == world.options.group_size
        for trajectory in group.trajectories:
            assert_bit_for_bit(trajectory, 8)


@pytest.mark.parametrize("partial", ["continue", "restart", "drop"])
@pytest.mark.parametrize("seed", range(4))
@virtual_time
async def test_every_group_is_accounted_for(tmp_path: Path, seed: int, partial: str) -> None:
    """Invariant 7 after every event; each prompt trained at most once; the journal tells the same story."""
    world = World(tmp_path, engines=3, partial=partial, filter_zero_variance=seed % 2 == 0)
    trained: Counter[int] = Counter()
    async with world:
        executor = world.executor
        chaos = Chaos(world, seed)
        world.client.on_event = world.assert_accounted
        world.scorer.answer = lambda prompt: chaos.reward()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chaos.run)
            try:
                async for batch in executor.batches(Prompts(None)):
                    check_batch(world, batch)
                    await anyio.sleep(5)
                    executor.mark_trained(batch)
                    world.assert_accounted()
                    trained.update(group.prompt.index for group in batch.groups)
                    world.update(batch.step + 1)
                    if batch.step == STEPS:
                        break
            except RolloutFailed as error:
                pytest.fail(f"the run ended: {error!r} from {error.__cause__!r}")
            tasks.cancel_scope.cancel()
    account = executor.account
    assert account.lost == 0 and account.duplicated == 0
    assert account.trained == STEPS * 2 == len(trained)
    assert world.leases.held == 0 and executor.statistics().running == 0 and executor._permits.taken == 0
    assert_journal_agrees(tmp_path / "journal.sqlite", world)


def assert_journal_agrees(path: Path, world: World) -> None:
    account = world.executor.account
    connection = sqlite3.connect(path)
    try:
        (dispatched,) = connection.execute("SELECT COUNT(*) FROM groups").fetchone()
        outcomes = dict(connection.execute("SELECT outcome, COUNT(*) FROM outcomes GROUP BY outcome").fetchall())
        (cursor,) = connection.execute("SELECT MAX(cursor) FROM groups").fetchone()
    finally:
        connection.close()
    assert dispatched == account.dispatched == cursor
    expected = {name: getattr(account, name) for name in ("trained", "filtered", "dropped", "failed")}
    assert outcomes == {name: count for name, count in expected.items() if count}
