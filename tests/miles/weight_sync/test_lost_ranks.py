"""Trainer ranks are lost and replaced: nothing half staged is committed, engines go on, nobody waits for the dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import PublishFailed, WeightSyncError
from controllers.events import EngineLaunched, VersionPublished
from miles.weight_sync.messages import PROTOCOL, Ask, Pull
from miles.weight_sync.service import TrainerWentOn
from tests.miles.weight_sync.harness import Rig, cut_rows_or_columns, publish, quick, rig, same

pytestmark = pytest.mark.real


def published(r: Rig) -> list[tuple[int, int]]:
    return [(e.version.number, e.version.step) for e in r.events if isinstance(e, VersionPublished)]


@pytest.fixture(params=["rdt", "disk"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def a_rig(transport: str, folder: Path, **options: Any) -> AsyncIterator[Rig]:
    async with rig(count=2, world=2, options=quick(transport=transport, folder=folder, **options)) as r:
        yield r


@pytest.mark.parametrize("lost_in", ["stage", "slot_sums", "open_publisher", ""])
async def test_ranks_lost_in_a_publication_are_replaced_in_it(
    lost_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the new ranks' slots are not opened, or the lost ones' number is committed."""
    monkeypatch.setattr("miles.weight_sync.publisher.INLINE_DIGEST_BYTES", 0)
    async with a_rig("rdt", tmp_path) as r:
        await r.serving(await publish(r, 1))
        engines = [r.engine("engine-0"), r.engine("engine-1")]
        if lost_in in ("", "open_publisher"):
            r.ranks.lose()
        r.ranks.lost_in = lost_in
        number = await publish(r, 2)
        await r.serving(number)
        assert published(r) == [(1, 1), (number, 2)]
        assert number == (3 if lost_in in ("stage", "slot_sums") else 2)
        for engine in engines:
            assert engine.alive and engine.paused is None
            assert same(engine.model, r.ranks.weights)
        assert r.service.statistics().pull_failures == 0


async def test_ranks_lost_after_they_staged_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the check between staging and commit."""
    async with a_rig("rdt", tmp_path) as r:
        await r.serving(await publish(r, 1))
        stage = r.service._slots.stage

        async def stage_and_lose(*args: Any) -> Any:
            staged = await stage(*args)
            r.ranks.lose()
            monkeypatch.undo()
            return staged

        monkeypatch.setattr(r.service._slots, "stage", stage_and_lose)
        assert await publish(r, 2) == 3
        await r.serving(3)
        assert published(r) == [(1, 1), (3, 2)]


async def test_a_new_engine_does_not_wait_for_the_next_step(transport: str, tmp_path: Path) -> None:
    """The ranks are lost while all engines start anew: without them no step would come, so no publication either.

    Fails (for `rdt`: it is failed again and again) when an engine pulls from ranks that are gone.
    """
    async with a_rig(transport, tmp_path) as r:
        await r.serving(await publish(r, 7))
        r.ranks.lose()
        for name in ("engine-0", "engine-1"):
            r.controller.fail(name, r.engine(name).incarnation, "for the test")
        await r.serving(2)
        assert published(r) == [(1, 7), (2, 7)]
        for name in ("engine-0", "engine-1"):
            assert same(r.engine(name).model, r.ranks.weights)
        launched = [event for event in r.events if isinstance(event, EngineLaunched)]
        assert len(launched) == 4
        statistics = r.service.statistics()
        assert (statistics.update_failures, statistics.fallbacks) == (0, 0)


async def test_nothing_is_granted_from_ranks_that_are_gone(tmp_path: Path) -> None:
    async with a_rig("rdt", tmp_path) as r:
        await r.serving(await publish(r, 1))
        ask = Ask(protocol=PROTOCOL, incarnation=r.engine("engine-0").incarnation, rank=0)
        assert r.service.acquire(ask) is not None
        r.ranks.lose()
        assert r.service.acquire(ask) is None


async def test_a_pull_that_the_death_cuts_off_is_no_fault_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two such pulls would send it to disk, four would fail it. Fails when they count."""
    async with a_rig("rdt", tmp_path) as r:
        await r.serving(await publish(r, 1))
        engines = [r.engine("engine-0"), r.engine("engine-1")]
        grants: list[str] = []
        acquire = r.service.acquire

        def grant_and_lose(ask: Ask) -> Pull | None:
            job = acquire(ask)
            if job is not None and len(grants) < 9:
                grants.append(ask.incarnation)
                r.ranks.lose()
            return job

        monkeypatch.setattr(r.service, "acquire", grant_and_lose)
        await publish(r, 2)
        await r.serving(2 + 9)  # each loss is answered by one publication for the engines that want to pull
        assert [r.engine("engine-0"), r.engine("engine-1")] == engines
        for engine in engines:
            assert same(engine.model, r.ranks.weights)
        statistics = r.service.statistics()
        assert statistics.pull_failures >= 9
        assert (statistics.update_failures, statistics.fallbacks) == (0, 0)


async def test_a_step_meanwhile_is_never_mislabelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes on while new ranks stage for an engine that waits. Fails without the comparison of steps."""
    async with a_rig("rdt", tmp_path) as r:
        await r.serving(await publish(r, 7))
        r.ranks.lose()
        run = r.ranks.on_each_rank

        async def step_meanwhile(function: Any, *args: Any) -> Any:
            result = await run(function, *args)
            if function.__name__ == "stage":
                r.ranks.step(8)
                monkeypatch.undo()
            return result

        monkeypatch.setattr(r.ranks, "on_each_rank", step_meanwhile)
        with pytest.raises(TrainerWentOn):
            await r.service._publish(None, 1)
        await r.service.ensure_source()
        assert published(r) == [(1, 7), (3, 8)]


async def test_new_ranks_that_hold_other_parts_are_refused(tmp_path: Path) -> None:
    async with a_rig("rdt", tmp_path) as r:
        await publish(r, 1)
        for rank in r.ranks.ranks:
            rank.cut = lambda name, shape, rank, world: cut_rows_or_columns(name, shape, world - 1 - rank, world)
        r.ranks.lose()
        with pytest.raises(WeightSyncError, match="other parts"):
            await publish(r, 2)


async def test_ranks_that_stay_dead_fail_the_publication(tmp_path: Path) -> None:
    async with a_rig("rdt", tmp_path) as r:
        await publish(r, 1)
        r.ranks.dead = True
        with pytest.raises(PublishFailed, match="trainer-0 died"):
            await publish(r, 2)
        r.ranks.dead = False
