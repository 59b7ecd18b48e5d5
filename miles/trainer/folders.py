"""Folders that are whole or absent: written under a temporary name beside their place, then renamed.

A removal takes the same way back, so a process that is killed in either leaves temporary names only; whoever owns the
parent folder removes those at its next start.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controllers.errors import ConfigError

_SUFFIX = ".tmp"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` on a clean exit and is removed otherwise.

    Raises ConfigError when `target` exists and is not empty.
    """
    refuse_occupied(target)
    temporary = temporary_beside(target)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_beside(target: Path) -> Path:
    """A name for a new folder in the same file system as `target`."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{_SUFFIX}")


def refuse_occupied(target: Path) -> None:
    """Raise ConfigError when `target` is there with something in it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{str(target)!r} exists and is not empty")


def publish(temporary: Path, target: Path) -> None:
    """Flush `temporary` to the disk and rename it to `target`, which must be absent or an empty folder."""
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    temporary.rename(target)
    _flush(target.parent)


def remove_whole(folder: Path) -> None:
    """Remove a folder. At no moment is there a part of it under its name."""
    temporary = temporary_beside(folder)
    folder.rename(temporary)
    shutil.rmtree(temporary)


def remove_leftovers(parent: Path) -> None:
    """Remove what was being written or removed in `parent` when its process died. Nobody may be at work there."""
    for leftover in parent.glob(f".*.*{_SUFFIX}"):
        shutil.rmtree(leftover)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
