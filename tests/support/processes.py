"""Waiting for processes to end, by an event and with a deadline, also when they are not our children."""

from __future__ import annotations

import asyncio
import os
import select
import time

from miles.cluster.reaper import start_ticks


def wait_gone(pids: list[int], deadline_s: float) -> list[int]:
    """Return the pids that still run after `deadline_s`; return early when none does."""
    deadline = time.monotonic() + deadline_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)
    return [pid for pid in pids if start_ticks(pid) is not None]


async def wait_gone_async(pids: list[int], deadline_s: float) -> list[int]:
    """`wait_gone` without stopping the event loop."""
    return await asyncio.to_thread(wait_gone, pids, deadline_s)
