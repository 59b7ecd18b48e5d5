"""Publishing, meeting engines and leaving: the service with all of its real parts, in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from controllers.errors import PublishFailed, WeightSyncError
from controllers.events import EngineLaunched, VersionProven, VersionPublished
from miles.weight_sync.arena import SlotArena
from miles.weight_sync.options import WeightSyncOptions
from tests.miles.weight_sync.harness import publish, quick, rig, same

pytestmark = pytest.mark.real


@pytest.mark.parametrize(("transport", "world"), [("rdt", 1), ("rdt", 2), ("disk", 2)])
async def test_every_version_reaches_every_engine_bit_for_bit(transport: str, world: int, tmp_path: Path) -> None:
    options = quick(transport=transport, folder=tmp_path / "weights", audit_every=2)
    async with rig(count=2, world=world, options=options) as r:
        for seed in range(1, 6):
            number = await publish(r, seed)
            await r.serving(number)
            for name in ("engine-0", "engine-1"):
                engine = r.engine(name)
                assert same(engine.model, r.ranks.weights), (name, seed)
                assert engine.paused is None
                assert engine.weight_version == f"{engine.incarnation}:{number}"
        statistics = r.service.statistics()
        assert (statistics.publishes, statistics.joins, statistics.updates) == (5, 2, 8)
        assert (statistics.pull_failures, statistics.fallbacks, statistics.stale_votes) == (0, 0, 0)
        assert statistics.active_leases == 0
        assert statistics.audits in range(2 + 2, 2 + 2 + 2 + 1)  # the last ones run off the pause
        latest = r.controller.ledger.latest
        assert latest is not None
        assert (latest.step, latest.lineage) == (5, 1)
    assert not (tmp_path / "weights").exists()  # a run leaves nothing behind


async def test_a_new_life_gets_the_newest_version_without_the_trainer(disk: WeightSyncOptions) -> None:
    async with rig(count=2, options=disk) as r:
        await r.serving(await publish(r, 1))
        await r.serving(newest := await publish(r, 2))
        calls = list(r.ranks.calls)
        with anyio.fail_after(30):
            await r.controller.restart("engine-0")
        assert len(r.launcher.lives("engine-0")) == 2
        await r.serving(newest)
        assert same(r.engine("engine-0").model, r.ranks.weights)
        assert r.ranks.calls == calls
        assert r.service.statistics().joins == 3


async def test_a_version_that_one_rank_did_not_stage_is_never_committed(disk: WeightSyncOptions) -> None:
    """Fails if the check of `report.error` is dropped in RankSlots.stage."""
    async with rig(world=2, options=disk) as r:
        await r.serving(first := await publish(r, 1))
        served = {name: tensor.clone() for name, tensor in r.ranks.weights.items()}
        r.ranks.ranks[1].lost = True
        with pytest.raises(PublishFailed, match="trainer rank 1 did not stage version 2") as caught:
            await publish(r, 2)
        assert caught.value.rank == 1
        latest = r.controller.ledger.latest
        assert latest is not None
        assert latest.number == first
        assert len([event for event in r.events if isinstance(event, VersionPublished)]) == 1
        assert same(r.engine().model, served)
        r.ranks.ranks[1].lost = False
        assert await publish(r, 3) == 3  # the number of the failed one is never used again
        await r.serving(3)
        assert same(r.engine().model, r.ranks.weights)
        assert r.service.statistics().publish_failures == 1


async def test_a_dead_rank_is_a_failed_publication(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        r.ranks.dead = True
        with pytest.raises(PublishFailed, match="trainer-0 died"):
            await publish(r, 1)


async def test_a_rank_that_hangs_is_a_failed_publication(disk: WeightSyncOptions) -> None:
    async with rig(options=quick(transport="disk", folder=disk.folder, publish_timeout_s=0.05)) as r:
        entered = anyio.Event()

        async def hang(*_: Any) -> list[Any]:
            entered.set()
            await anyio.sleep_forever()
            return []

        r.ranks.on_each_rank = hang  # type: ignore[method-assign,assignment]
        with pytest.raises(PublishFailed, match=r"not within 0\.05 s"):
            await publish(r, 1)
        assert entered.is_set()
        del r.ranks.on_each_rank


async def test_the_committed_slot_is_never_staged_into(disk: WeightSyncOptions) -> None:
    """Fails if publish passes None for the committed slot, since free_slot then gives slot 0 every time."""
    async with rig(options=disk) as r:
        for seed in range(1, 7):
            await publish(r, seed)
        assert all(a != b for a, b in zip(r.ranks.slots, r.ranks.slots[1:], strict=False))


async def test_a_draining_engine_gets_no_weights(disk: WeightSyncOptions) -> None:
    async with rig(count=2, options=disk) as r:
        await r.serving(await publish(r, 1))
        drained = r.engine("engine-0")
        loads = drained.loads
        await r.controller.drain("engine-0")
        await r.serving(await publish(r, 2), count=1)
        assert drained.loads == loads
        assert same(r.engine("engine-1").model, r.ranks.weights)


async def test_the_bodys_error_leaves_as_it_is(disk: WeightSyncOptions) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with rig(options=disk):
            raise ValueError("mine")


async def test_ranks_whose_boxes_leave_a_hole_are_refused_at_the_start(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        sealed = r.ranks.ranks[0].cut
        r.ranks.ranks[0].cut = lambda name, shape, rank, world: tuple((0, n // 2) for n in shape)
        with pytest.raises(WeightSyncError, match="no rank holds"):
            await r.service._slots.open()
        r.ranks.ranks[0].cut = sealed


async def test_a_service_that_starts_late_meets_the_engines_that_wait(disk: WeightSyncOptions) -> None:
    async with rig(count=2, options=disk) as r:
        launched = [event.incarnation for event in r.events if isinstance(event, EngineLaunched)]
        await r.serving(await publish(r, 1))
        proven = {event.incarnation for event in r.events if isinstance(event, VersionProven)}
        assert set(launched) <= proven


async def test_a_large_slot_is_digested_on_a_thread_after_the_copy(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles.weight_sync.publisher.INLINE_DIGEST_BYTES", 0)
    threads: list[str] = []
    sums = SlotArena.sums

    def note(self: SlotArena, index: int, owned: Any) -> dict[str, int]:
        threads.append(threading.current_thread().name)
        return sums(self, index, owned)

    monkeypatch.setattr(SlotArena, "sums", note)
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        assert threads == ["miles-digest"]
        assert r.ranks.calls.count("slot_sums") == 1
        assert same(r.engine().model, r.ranks.weights)
