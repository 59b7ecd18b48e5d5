"""Batches on disk: one file a training step, `step-000012.msgpack`, whole or absent.

    [format, step, staleness, version_steps], group, group, ...        one msgpack array

The trainer's driver logs every batch before its step runs, so that ranks which died can train it again; a dump for
debugging has the same form. Encoded and decoded group by group: no single call holds the interpreter for long.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from controllers.errors import ConfigError
from executors.trajectory import Batch, Group

BATCHES_FOLDER = "batches"
"""Where a run folder has them."""
FORMAT = "miles.batch.1"
_ARRAY_32 = 0xDD


class _Head(msgspec.Struct, frozen=True, array_like=True):
    format: str
    step: int
    staleness: tuple[int, ...]
    version_steps: dict[int, int]


def batch_file(folder: Path, step: int) -> Path:
    """Where the batch of `step` lies in `folder`."""
    return folder / f"step-{step:06d}.msgpack"


def logged_steps(folder: Path) -> list[int]:
    """The steps whose batches lie in `folder`, ascending; none where there is no folder."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-[0-9]*.msgpack"))


def write_batch(path: Path, batch: Batch) -> None:
    """Write `batch` in place of whatever file is there. It blocks: call it in a thread.

    Raises TypeError for something in a prompt's `extra` that is not plain data, OSError for a disk that is full.
    """
    encoder = msgspec.msgpack.Encoder()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack(">BI", _ARRAY_32, 1 + len(batch.groups)))
            file.write(encoder.encode(_Head(FORMAT, batch.step, batch.staleness, batch.version_steps)))
            for group in batch.groups:
                file.write(encoder.encode(group))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_batch(path: Path) -> Batch:
    """What `write_batch` wrote. It blocks: call it in a thread. Raises ConfigError for a file that is no batch."""
    try:
        parts = msgspec.msgpack.decode(path.read_bytes(), type=list[msgspec.Raw])
        head = msgspec.msgpack.decode(parts[0], type=_Head)
        if head.format != FORMAT:
            raise ConfigError(f"{str(path)!r} has format {head.format!r}, not {FORMAT!r}")
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Group)
        groups = tuple(decoder.decode(part) for part in parts[1:])
    except FileNotFoundError as error:
        raise ConfigError(f"there is no batch {str(path)!r}") from error
    except (msgspec.MsgspecError, IndexError) as error:
        raise ConfigError(f"{str(path)!r} is not a batch: {error}") from error
    return Batch(groups, head.step, head.staleness, head.version_steps)


class BatchLog:
    """The batches of one folder, written and read off the event loop. With `keep`, `covered` removes nothing."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.folder = folder.absolute()
        self._keep = keep

    async def add(self, batch: Batch) -> Path:
        """Log a batch before its step runs. A second time for a step replaces the first."""
        path = batch_file(self.folder, batch.step)
        await anyio.to_thread.run_sync(write_batch, path, batch)
        return path

    async def read(self, step: int) -> Batch:
        """The batch of `step`. Raises ConfigError when it was not logged."""
        return await anyio.to_thread.run_sync(read_batch, batch_file(self.folder, step))

    async def covered(self, step: int) -> None:
        """A checkpoint holds everything up to `step`: those batches will not be needed again."""
        if not self._keep:
            await anyio.to_thread.run_sync(self._remove_through, step)

    def _remove_through(self, step: int) -> None:
        for logged in logged_steps(self.folder):
            if logged <= step:
                batch_file(self.folder, logged).unlink(missing_ok=True)
