"""The service with the real controller, publisher, transports, control server and pull agents, in one process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from controllers.errors import EngineUnreachable, PublishFailed, WeightSyncError
from controllers.events import EngineLaunched, EngineStateChanged, VersionProven, VersionPublished
from miles.weight_sync.agent import PullAgent
from miles.weight_sync.arena import SlotArena
from miles.weight_sync.control_client import ControlClient, ControlRefused, NoLongerWanted
from miles.weight_sync.messages import PROTOCOL, Ask, Ready
from miles.weight_sync.options import WeightSyncOptions
from miles.weight_sync.transports.base import PullError, TornRead
from miles.weight_sync.transports.disk import DiskReader
from miles.weight_sync.transports.rdt import RdtReader
from tests.miles.weight_sync.harness import AgentEngine, Rig, quick, rig, same

pytestmark = pytest.mark.real


@pytest.fixture
def disk(tmp_path: Path) -> WeightSyncOptions:
    """The quickest transport to set up, for tests that are not about transports."""
    return quick(transport="disk", folder=tmp_path / "weights")


async def publish(r: Rig, seed: int) -> int:
    """New weights, published; the version's number."""
    r.ranks.step(seed)
    return (await r.service.publish(seed)).number


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


async def test_no_engine_serves_before_its_proof_and_every_update_is_one_pause(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        await r.serving(await publish(r, 2))
        kinds = (VersionProven, EngineStateChanged)
        seen = [
            type(event).__name__ if isinstance(event, VersionProven) else event.state
            for event in r.events
            if isinstance(event, kinds)
        ]
        assert seen == ["Launching", "Syncing", "VersionProven", "Serving", "Updating", "VersionProven", "Serving"]
        update = ["pause", "call_weight_loader", "set_weight_version", "resume"]
        assert [call[0] for call in r.engine().calls if call[0] != "health"] == ["call_weight_loader", *update, *update]
        assert ("pause", "in_place") in r.engine().calls


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
    """Fails if the check of `report.error` is dropped in WeightSyncService._stage."""
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


@pytest.mark.parametrize("method", ["pause", "set_weight_version", "resume"])
async def test_an_error_in_the_pause_restarts_the_engine_at_the_newest_version(
    method: str, disk: WeightSyncOptions
) -> None:
    """Fails (the engine stays paused) if _install were called outside of `controller.updating`."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        old.refuse(method, EngineUnreachable("cut off", engine="engine-0"))
        newest = await publish(r, 2)
        await r.serving(newest)
        assert r.engine() is not old
        assert not old.alive
        assert r.engine().paused is None
        assert same(r.engine().model, r.ranks.weights)
        assert r.service.statistics().update_failures == 1


async def test_a_failed_install_is_a_vote_and_the_engine_is_not_resumed(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torn live weights must not generate: fails if _install resumed in a `finally`."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        resumed = old.called("resume")
        copy = PullAgent._copy

        def torn(self: PullAgent, staging: Any) -> None:
            if self.model is not old.model:
                return copy(self, staging)
            self._targets[0].zero_()
            raise RuntimeError("out of memory in mid-copy")

        monkeypatch.setattr(PullAgent, "_copy", torn)
        await r.serving(await publish(r, 2))
        assert r.engine() is not old
        assert old.called("resume") == resumed
        assert same(r.engine().model, r.ranks.weights)


async def test_live_weights_that_are_not_what_was_staged_are_never_admitted(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine claims an install that never happened. Fails if `_audit` is dropped from EngineFollower._join."""
    async with rig(options=disk) as r:
        copy = PullAgent._copy
        liars: list[PullAgent] = []

        def lie_once(self: PullAgent, staging: Any) -> None:
            if not liars:
                liars.append(self)
            else:
                copy(self, staging)

        monkeypatch.setattr(PullAgent, "_copy", lie_once)
        await r.serving(await publish(r, 1))
        lives = r.launcher.lives("engine-0")
        assert len(lives) == 2
        proven = [event.incarnation for event in r.events if isinstance(event, VersionProven)]
        assert proven == [lives[1].incarnation]
        assert same(r.engine().model, r.ranks.weights)


async def test_an_audit_catches_weights_that_went_bad_while_serving(disk: WeightSyncOptions) -> None:
    """Fails if `_audit` is dropped from EngineFollower._update."""
    async with rig(options=quick(transport="disk", folder=disk.folder, audit_every=1)) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        agent_copy = PullAgent._copy
        with pytest.MonkeyPatch.context() as patch:

            def flip(self: PullAgent, staging: Any) -> None:
                agent_copy(self, staging)
                if self.model is old.model:
                    self._targets[3].view(torch.uint8)[0, 0] ^= 1

            patch.setattr(PullAgent, "_copy", flip)
            await publish(r, 2)
            with anyio.fail_after(20):
                assert (await old.wait_exit()).returncode is not None
        await r.serving(2)
        assert same(r.engine().model, r.ranks.weights)


async def test_a_missing_vote_fails_the_engine_and_names_it(disk: WeightSyncOptions) -> None:
    async with rig(options=quick(transport="disk", folder=disk.folder, vote_timeout_s=0.2)) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        old.drop_installs = True
        await r.serving(await publish(r, 2))
        failed = [event for event in r.events if isinstance(event, EngineStateChanged) and event.state == "Failed"]
        assert len(failed) == 1
        assert failed[0].incarnation == old.incarnation
        assert "install" in (failed[0].reason or "")
        assert same(r.engine().model, r.ranks.weights)


async def test_a_draining_engine_gets_no_weights(disk: WeightSyncOptions) -> None:
    async with rig(count=2, options=disk) as r:
        await r.serving(await publish(r, 1))
        drained = r.engine("engine-0")
        loads = drained.loads
        await r.controller.drain("engine-0")
        await r.serving(await publish(r, 2), count=1)
        assert drained.loads == loads
        assert same(r.engine("engine-1").model, r.ranks.weights)


async def test_votes_of_an_earlier_life_are_dropped_and_counted(disk: WeightSyncOptions) -> None:
    """Fails if the service looks sessions up by engine instead of incarnation."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine().incarnation
        with anyio.fail_after(30):
            await r.controller.restart("engine-0")
        client = ControlClient(r.service._server.url, r.service._token, old, 0, attempts=1)
        with pytest.raises(NoLongerWanted):
            await anyio.to_thread.run_sync(client.vote, Ready(incarnation=old, rank=0))
        assert r.service.statistics().stale_votes == 1
        client.close()


async def test_the_control_server_refuses_strangers_and_other_protocols(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        stranger = ControlClient(r.service._server.url, "guess", "i", 0, attempts=1)
        with pytest.raises(ControlRefused, match="401"):
            await anyio.to_thread.run_sync(stranger.next_job)
        other = ControlClient(r.service._server.url, r.service._token, "i", 0, attempts=1)
        other._ask = Ask(PROTOCOL + 1, "i", 0)
        with pytest.raises(ControlRefused, match=f"protocol {PROTOCOL + 1} is not {PROTOCOL}"):
            await anyio.to_thread.run_sync(other.next_job)
        stranger.close()
        other.close()


async def test_two_failed_pulls_send_the_engine_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(options=quick(folder=tmp_path / "weights")) as r:
        await r.serving(await publish(r, 1))
        failures: list[int] = []

        def fail(self: RdtReader, source: bytes, record: Any, renew: Any) -> int:
            failures.append(record.version)
            raise PullError("the fabric is down")

        monkeypatch.setattr(RdtReader, "pull", fail)
        await r.serving(await publish(r, 2))
        assert failures == [2, 2]
        assert len(r.launcher.lives("engine-0")) == 1
        assert same(r.engine().model, r.ranks.weights)
        statistics = r.service.statistics()
        assert (statistics.pull_failures, statistics.fallbacks) == (2, 1)
        monkeypatch.undo()
        await r.serving(await publish(r, 3))  # the next version is tried over rdt again
        assert same(r.engine().model, r.ranks.weights)
        assert r.service.statistics().fallbacks == 1
        assert os.listdir(tmp_path / "weights") == []  # retired with its version


async def test_without_a_folder_failed_pulls_fail_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(options=quick()) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        pull = RdtReader.pull

        def fail(self: RdtReader, source: bytes, record: Any, renew: Any) -> int:
            if old.alive:
                raise PullError("the fabric is down")
            return pull(self, source, record, renew)

        monkeypatch.setattr(RdtReader, "pull", fail)
        await r.serving(await publish(r, 2))
        assert r.engine() is not old
        reasons = [event.reason for event in r.events if isinstance(event, EngineStateChanged) and event.reason]
        assert any("the fabric is down" in reason for reason in reasons)


async def test_a_slow_reader_is_revoked_and_skips_to_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader sits on version 2 while 3 and 4 are published: 4 needs its slot, and the reader's header tells."""
    async with rig(options=quick()) as r:
        await r.serving(await publish(r, 1))
        entered, go_on = threading.Event(), threading.Event()
        pulled: list[int] = []
        read_slot = RdtReader.pull

        def slow(self: RdtReader, source: bytes, record: Any, renew: Any) -> int:
            if not entered.is_set():
                entered.set()
                assert go_on.wait(20)
            nbytes = read_slot(self, source, record, renew)
            pulled.append(record.version)
            return nbytes

        monkeypatch.setattr(RdtReader, "pull", slow)
        await publish(r, 2)
        assert await anyio.to_thread.run_sync(entered.wait, 20)
        await publish(r, 3)
        assert r.service.statistics().leases_revoked == 0
        newest = await publish(r, 4)
        assert r.service.statistics().leases_revoked == 1
        go_on.set()
        await r.serving(newest)
        assert pulled == [4]
        assert same(r.engine().model, r.ranks.weights)
        assert r.service.statistics().pull_failures == 0


async def test_at_most_max_updating_engines_pause_at_once(disk: WeightSyncOptions) -> None:
    """Fails if `self._updating` is dropped from EngineFollower._update."""
    async with rig(count=3, options=quick(transport="disk", folder=disk.folder, max_updating=1)) as r:
        await r.serving(await publish(r, 1))
        together: list[int] = []

        def note(*_: object) -> None:
            together.append(sum(each.paused is not None for each in r.launcher.alive()))

        for each in r.launcher.alive():
            each.on_load = note
        await r.serving(await publish(r, 2))
        assert together == [1, 1, 1]


async def test_leaving_in_the_middle_of_a_pause_leaves_no_engine_paused(disk: WeightSyncOptions) -> None:
    """Fails if the pause is not shielded in EngineFollower._install: the update would end without its proof."""
    left = anyio.Event()
    engines: list[AgentEngine] = []
    events: list[Any] = []

    async def session() -> None:
        async with rig(options=disk) as r:
            await r.serving(await publish(r, 1))
            engines.append(r.engine())
            events.append(r.events)
            r.engine().hang("set_weight_version")
            async with r.controller.bus.subscribe("test", kinds=(VersionProven,)) as proofs:
                await publish(r, 2)
                await anext(proofs)
        left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session)
        with anyio.fail_after(20):
            while not engines or not engines[0].called("set_weight_version") > 1:
                await anyio.wait_all_tasks_blocked()
        assert not left.is_set()
        engine = engines[0]
        assert engine.paused == "in_place"
        engine.release("set_weight_version")
    assert engine.paused is None
    states = [event.state for event in events[0] if isinstance(event, EngineStateChanged)]
    assert "Failed" not in states


@pytest.mark.parametrize("joining", [False, True])
async def test_a_pause_that_hangs_holds_up_no_shutdown_and_its_engine_is_failed(
    joining: bool, disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if _give_up_after_cancellation is dropped: Ctrl-C would wait for twice the vote timeout."""
    monkeypatch.setattr("miles.weight_sync.engine_follower._CANCELLED_PAUSE_S", 0.05)
    with anyio.fail_after(8):
        async with rig(options=disk) as r:
            await anyio.wait_all_tasks_blocked()
            engine, events = r.engine(), r.events
            if not joining:
                await r.serving(await publish(r, 1))
            resumed = engine.called("resume")
            paused = anyio.Event()

            async def pause(mode: str) -> None:
                paused.set()
                await anyio.sleep_forever()

            engine.pause = pause  # type: ignore[method-assign]
            await publish(r, 2)
            await paused.wait()
    failed = [event for event in events if isinstance(event, EngineStateChanged) and event.state == "Failed"]
    assert [event.incarnation for event in failed] == [engine.incarnation]
    assert engine.called("resume") == resumed


async def test_the_bodys_error_leaves_as_it_is(disk: WeightSyncOptions) -> None:
    with pytest.raises(ValueError, match="mine"):
        async with rig(options=disk):
            raise ValueError("mine")


async def test_ranks_whose_boxes_leave_a_hole_are_refused_at_the_start(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        sealed = r.ranks.ranks[0].cut
        r.ranks.ranks[0].cut = lambda name, shape, rank, world: tuple((0, n // 2) for n in shape)
        with pytest.raises(WeightSyncError, match="no rank holds"):
            await r.service._open_ranks()
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


async def test_a_torn_disk_read_is_retried_with_a_fresh_grant(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(options=disk) as r:
        pull = DiskReader.pull
        attempts: list[int] = []

        def torn_once(self: DiskReader, source: bytes, record: Any, renew: Any) -> int:
            attempts.append(record.version)
            if len(attempts) == 1:
                raise TornRead("removed meanwhile")
            return pull(self, source, record, renew)

        monkeypatch.setattr(DiskReader, "pull", torn_once)
        await r.serving(await publish(r, 1))
        assert attempts == [1, 1]
        assert r.service.statistics().pull_failures == 0
