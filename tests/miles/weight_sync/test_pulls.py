"""Pulls that fail, tear or are overtaken, and the fallback to disk, with a real service in one process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from controllers.events import EngineStateChanged
from miles.weight_sync.nixl_link import LinkError
from miles.weight_sync.options import WeightSyncOptions
from miles.weight_sync.pull_client import PullClient
from miles.weight_sync.transports.base import PullError, TornRead
from miles.weight_sync.transports.disk import DiskReader
from miles.weight_sync.transports.rdt import RdtReader
from tests.miles.weight_sync.harness import publish, quick, rig, same

pytestmark = pytest.mark.real


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


async def test_an_engine_where_nixl_cannot_start_gets_its_weights_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if PullClient._open lets LinkError through: the agent would vote Failed instead of PullFailed."""

    def no_agent(name: str) -> None:
        raise LinkError("create an agent: no such backend")

    monkeypatch.setattr(PullClient.__init__, "__defaults__", (no_agent,))
    async with rig(options=quick(folder=tmp_path / "weights")) as r:
        await r.serving(await publish(r, 1))
        assert same(r.engine().model, r.ranks.weights)
        assert len(r.launcher.lives("engine-0")) == 1
        assert r.service.statistics().fallbacks == 1
