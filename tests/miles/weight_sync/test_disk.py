"""The disk transport alone: a folder is whole and marked, or it is not read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from controllers.errors import ConfigError, PublishFailed
from miles.weight_sync.arena import HEADER_FIXED, HEADER_PER_SLOT
from miles.weight_sync.messages import VersionRecord
from miles.weight_sync.plan import full_layout
from miles.weight_sync.publisher import open_publisher, publisher_of, stage
from miles.weight_sync.staging import Staging
from miles.weight_sync.transports.base import PullError, ReaderOptions, TornRead, TransportOptions, find_transport
from miles.weight_sync.transports.disk import MARKER, DiskReader, DiskTransport
from tests.miles.weight_sync.harness import LocalRanks


def nothing() -> None:
    """No lease to renew."""


def record(version: int) -> VersionRecord:
    return VersionRecord(version, version, 1, "0" * 16)


@dataclass
class Shelf:
    """Two ranks, a folder, and a reader. `write(v)` stages and publishes version v with weights of seed v."""

    ranks: LocalRanks
    transport: DiskTransport
    reader: DiskReader
    staging: Staging

    async def write(self, version: int) -> None:
        self.ranks.step(version)
        for report in await self.ranks.on_each_rank(stage, version % 2, version, [[], []]):
            assert report.error is None
        await self.transport.publish(self.ranks, record(version), version % 2)

    def read(self, version: int) -> int:
        return self.reader.pull(self.transport.source(record(version), 0), record(version), nothing)

    def holds(self) -> bool:
        names = [entry.name for entry in self.staging.layout.entries]
        return all(torch.equal(self.ranks.weights[n], v) for n, v in zip(names, self.staging.views, strict=True))


async def shelf(folder: Path) -> Shelf:
    ranks = LocalRanks(2)
    layouts = tuple(opened.layout for opened in await ranks.on_each_rank(open_publisher, 2) if opened.layout)
    transport = DiskTransport(TransportOptions(folder))
    await transport.open(ranks, layouts)
    staging = Staging(full_layout(layouts), torch.device("cpu"))
    return Shelf(ranks, transport, DiskReader(staging, ReaderOptions("reader", layouts, 5.0, 1 << 20, 0)), staging)


async def test_two_ranks_shards_come_back_whole(tmp_path: Path) -> None:
    s = await shelf(tmp_path)
    await s.write(1)
    assert s.read(1) == sum(entry.nbytes for entry in s.staging.layout.entries)
    assert s.holds()


async def test_a_folder_without_its_marker_is_never_read(tmp_path: Path) -> None:
    """Fails if DiskReader.pull goes by the rank files alone."""
    s = await shelf(tmp_path)
    await s.write(1)
    (tmp_path / "v00000001" / MARKER).unlink()
    with pytest.raises(TornRead, match="no completion marker"):
        s.read(1)
    assert not s.holds()


async def test_a_rank_that_fails_leaves_no_marker(tmp_path: Path) -> None:
    s = await shelf(tmp_path)
    await s.write(1)
    await s.ranks.on_each_rank(stage, 1, 3, [[], []])
    arena = publisher_of(s.ranks.ranks[1]).arena
    arena.header[HEADER_FIXED + HEADER_PER_SLOT] = 7  # rank 1 has begun to overwrite slot 1
    with pytest.raises(PublishFailed, match="trainer rank 1 did not write version 3"):
        await s.transport.publish(s.ranks, record(3), 1)
    assert not (tmp_path / "v00000003" / MARKER).exists()
    with pytest.raises(TornRead):
        s.read(3)


async def test_a_version_in_use_is_kept_and_a_retired_one_is_skipped(tmp_path: Path) -> None:
    """Keep-last 1 with a slow reader: its folder stays while it is leased; afterwards it is refused, not half read."""
    s = await shelf(tmp_path)
    await s.write(1)
    await s.write(2)
    await s.transport.retire({1, 2})
    s.read(1)
    await s.transport.retire({2})
    with pytest.raises(TornRead):
        s.read(1)
    s.read(2)
    assert s.holds()


async def test_files_of_another_version_or_layout_are_refused(tmp_path: Path) -> None:
    s = await shelf(tmp_path)
    await s.write(1)
    await s.write(2)
    name = "rank-00001.safetensors"
    (tmp_path / "v00000002" / name).write_bytes((tmp_path / "v00000001" / name).read_bytes())
    with pytest.raises(TornRead, match="is not version 2"):
        s.read(2)
    (tmp_path / "v00000001" / name).write_bytes(b"\x00" * 100)
    with pytest.raises(PullError, match="cannot be read"):
        s.read(1)


async def test_closing_removes_version_folders_and_nothing_else(tmp_path: Path) -> None:
    s = await shelf(tmp_path)
    await s.write(1)
    (tmp_path / "vocabulary").mkdir()
    await s.transport.close()
    assert os.listdir(tmp_path) == ["vocabulary"]


def test_disk_without_a_folder_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="folder"):
        DiskTransport(TransportOptions())


def test_transports_are_found_by_name() -> None:
    assert find_transport("disk") is DiskTransport
    with pytest.raises(ConfigError, match=r"no transport is called 'pigeon'; there are .*disk.*rdt"):
        find_transport("pigeon")
