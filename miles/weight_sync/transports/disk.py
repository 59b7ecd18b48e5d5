"""The `disk` transport: every rank writes its slot as safetensors into a folder per version on a shared path.

A folder without its completion marker is never read; the marker is the last thing written, by an atomic rename. A
folder is removed only when its version is neither the newest nor leased. Also the fallback of the other transports.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

from controllers.errors import ConfigError, PublishFailed
from miles.weight_sync.messages import Layout, VersionRecord
from miles.weight_sync.plan import plan_reads
from miles.weight_sync.transports.base import PullError, ReaderOptions, TornRead, TransportOptions

if TYPE_CHECKING:
    from miles.weight_sync.ports import RankRunner, RankTensors
    from miles.weight_sync.publisher import Done
    from miles.weight_sync.staging import Staging

MARKER = "COMPLETE.json"


class DiskSource(msgspec.Struct, frozen=True):
    """The folder of a version; empty where there is none yet."""

    folder: str


class Marker(msgspec.Struct, frozen=True):
    """What the completion marker says."""

    record: VersionRecord
    layout_ids: tuple[str, ...]


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def write_slot(context: RankTensors, folder: str, slot: int, version: int) -> Done:
    """Write this rank's slot (runs in the rank). Refuses a slot that does not hold `version` before and after."""
    from safetensors.torch import save_file

    from miles.weight_sync.publisher import Done, guarded, publisher_of

    def work() -> Done:
        arena = publisher_of(context).arena
        path = _rank_file(Path(folder), context.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if arena.version_in(slot) != version:
            raise ValueError(f"slot {slot} holds {arena.version_in(slot)}, not version {version}")
        temporary = path.with_suffix(".writing")
        metadata = {"layout_id": arena.layout.layout_id, "version": str(version), "rank": str(context.rank)}
        save_file({"slot": arena.slot(slot).cpu()}, temporary, metadata=metadata)
        if arena.version_in(slot) != version:
            raise ValueError(f"slot {slot} was overwritten while version {version} was written")
        os.replace(temporary, path)
        return Done(context.rank)

    return guarded(work, lambda error: Done(context.rank, error))


class DiskTransport:
    """The driver's end: has the ranks write, then writes the marker."""

    def __init__(self, options: TransportOptions) -> None:
        if options.folder is None:
            raise ConfigError("weight_sync.transport: 'disk' needs a folder that trainer and engines share")
        self._folder = options.folder
        self._layout_ids: tuple[str, ...] = ()

    async def open(self, ranks: RankRunner, layouts: Sequence[Layout]) -> None:
        self._layout_ids = tuple(layout.layout_id for layout in layouts)

    async def publish(self, ranks: RankRunner, record: VersionRecord, slot: int) -> None:
        folder = self._version_folder(record.version)
        for answer in await ranks.on_each_rank(write_slot, str(folder), slot, record.version):
            if answer.error is not None:
                raise PublishFailed(
                    f"trainer rank {answer.rank} did not write version {record.version}: {answer.error}",
                    number=record.version,
                    rank=answer.rank,
                )
        marker = msgspec.json.encode(Marker(record, self._layout_ids))
        await anyio.to_thread.run_sync(_write_marker, folder, marker)

    def source(self, record: VersionRecord | None, slot: int) -> bytes:
        return msgspec.json.encode(DiskSource("" if record is None else str(self._version_folder(record.version))))

    async def retire(self, in_use: Collection[int]) -> None:
        keep = {self._version_folder(version).name for version in in_use}
        await anyio.to_thread.run_sync(_remove_others, self._folder, keep)

    async def close(self) -> None:
        await self.retire(())

    @staticmethod
    def reader(staging: Staging, options: ReaderOptions) -> DiskReader:
        return DiskReader(staging, options)

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"v{version:08d}"


class DiskReader:
    """The engine's end."""

    def __init__(self, staging: Staging, options: ReaderOptions) -> None:
        self._staging = staging
        self._layouts = options.layouts
        self._plan = plan_reads(options.layouts, staging.layout)

    def connect(self, source: bytes) -> None:
        """Nothing to warm up."""

    def pull(self, source: bytes, record: VersionRecord, renew: Callable[[], None]) -> int:
        folder = Path(msgspec.json.decode(source, type=DiskSource).folder)
        try:
            marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
        except FileNotFoundError as error:
            raise TornRead(f"{folder} has no completion marker: it is being written, or has been removed") from error
        if marker.record.version != record.version or len(marker.layout_ids) != len(self._layouts):
            raise TornRead(f"{folder} holds version {marker.record.version}, not {record.version}")
        nbytes = 0
        for layout in self._layouts:
            nbytes += self._read_rank(folder, layout, record.version)
            renew()
        return nbytes

    def close(self) -> None:
        """Nothing is kept open."""

    def _read_rank(self, folder: Path, layout: Layout, version: int) -> int:
        from safetensors import SafetensorError, safe_open

        path = _rank_file(folder, layout.rank)
        nbytes = 0
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("layout_id"), metadata.get("version")) != (layout.layout_id, str(version)):
                    raise TornRead(f"{path} is not version {version} in the layout of rank {layout.rank}")
                slot = file.get_tensor("slot")
                for region in self._plan:
                    if region.rank == layout.rank:
                        part = slot[region.source : region.source + region.nbytes]
                        self._staging.flat[region.target : region.target + region.nbytes].copy_(part)
                        nbytes += region.nbytes
        except FileNotFoundError as error:
            raise TornRead(f"{path} has been removed") from error
        except (OSError, SafetensorError) as error:
            raise PullError(f"{path} cannot be read: {error}") from error
        return nbytes


def _write_marker(folder: Path, marker: bytes) -> None:
    temporary = folder / f"{MARKER}.writing"
    temporary.write_bytes(marker)
    os.replace(temporary, folder / MARKER)


def _remove_others(root: Path, keep: Collection[str]) -> None:
    """Remove version folders, marker first, so that nobody takes up one that is half gone."""
    if not root.is_dir():
        return
    for folder in root.iterdir():
        if folder.is_dir() and re.fullmatch(r"v\d{8,}", folder.name) and folder.name not in keep:
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    if not keep and not any(root.iterdir()):
        root.rmdir()
