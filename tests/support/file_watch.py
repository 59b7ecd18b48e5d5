"""Waiting for what another process writes to a file, by the kernel's own event (inotify), without looking again."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CREATED_OR_WRITTEN = 0x00000100 | 0x00000002 | 0x00000080  # IN_CREATE, IN_MODIFY, IN_MOVED_TO
_libc = ctypes.CDLL(None, use_errno=True)


async def when_written(folder: Path, look: Callable[[], T | None], deadline_s: float = 60.0) -> T:
    """What `look` returns, once that is something; it is asked again whenever a file in `folder` is written."""
    watch = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watch < 0 or _libc.inotify_add_watch(watch, os.fsencode(folder), _CREATED_OR_WRITTEN) < 0:
        raise OSError(ctypes.get_errno(), f"no watch on {folder}")
    loop, written = asyncio.get_running_loop(), asyncio.Event()

    def note() -> None:
        os.read(watch, 65536)
        written.set()

    loop.add_reader(watch, note)
    try:
        async with asyncio.timeout(deadline_s):
            while (found := look()) is None:
                await written.wait()
                written.clear()
            return found
    finally:
        loop.remove_reader(watch)
        os.close(watch)
