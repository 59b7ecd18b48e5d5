"""Finds and ends what a run left behind: processes, folders, shared-memory segments. Linux, standard library only.

A process belongs to a run when it was named by (pid, start time), when its environment carries the run's marker,
when it is a Ray daemon that logs into the run's Ray folder (Ray's agents overwrite their environment with their
title), or when it descends from one of these. Nothing else is ever signalled. `RayCluster` calls this at the end of
a run; run as a script it is the watchdog's process, which does the same when the driver is gone.

    driver --- JSON lines over stdin ---> watchdog      ops: pid, marker, folder, shm, release
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple

SHM_FOLDER = "/dev/shm"
HELD_SHM_PREFIXES = ("torch_", "sglang_loads_", "psm_", "sem.mp-", "ucx_shm_posix_", "nccl-", "plasma")
"""Families of segments that libraries leave when killed; removed only where a process of the run held them."""
KILL_DEADLINE_S = 10.0


class ProcessId(NamedTuple):
    """A process for certain: pids come back, a pid with its start time (clock ticks since boot) does not."""

    pid: int
    start_ticks: int


class ProcessEntry(NamedTuple):
    """One line of the process table."""

    id: ProcessId
    parent: int


class Belongings:
    """What one run owns on this machine."""

    def __init__(self) -> None:
        self.roots: set[ProcessId] = set()
        self.markers: set[str] = set()
        self.folders: set[str] = set()
        self.shm_prefixes: set[str] = set()

    def processes(self) -> set[ProcessId]:
        """Every living process of the run, without this one and its ancestors."""
        table = process_table()
        spared = _with_ancestors(os.getpid(), table)
        found = {pid for pid, entry in table.items() if pid not in spared and self._owns(entry.id)}
        grew = True
        while grew:
            children = {pid for pid, entry in table.items() if entry.parent in found} - found - spared
            found |= children
            grew = bool(children)
        return {table[pid].id for pid in found}

    def _owns(self, process: ProcessId) -> bool:
        return (
            process in self.roots
            or (bool(self.markers) and not self.markers.isdisjoint(environment_names(process.pid)))
            or (bool(self.folders) and _is_ray_daemon_of(process.pid, self.folders))
        )


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None when it is gone (a zombie is gone)."""
    entry = _entry(pid)
    return None if entry is None else entry.id.start_ticks


def process_table() -> dict[int, ProcessEntry]:
    """Living processes by pid."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {entry.id.pid: entry for pid in pids if (entry := _entry(pid)) is not None}


def _entry(pid: int) -> ProcessEntry | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()  # the name before may hold spaces and brackets
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return ProcessEntry(ProcessId(pid, int(fields[19])), int(fields[1]))


def environment_names(pid: int) -> set[str]:
    """Names of a process's environment variables as it was started; empty where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return {line.partition(b"=")[0].decode(errors="replace") for line in file.read().split(b"\0")}
    except OSError:
        return set()


def _is_ray_daemon_of(pid: int, folders: set[str]) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if not file.read(5).startswith(b"ray::"):
                return False
    except OSError:
        return False
    return any(path.startswith(tuple(f"{folder}/" for folder in folders)) for path in open_files(pid))


def open_files(pid: int) -> set[str]:
    """Paths of the files a process has open or mapped; empty where it may not be read."""
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
        paths |= {line[position:].rstrip("\n") for line in file if (position := line.find("/")) > 0}
    return paths


def _with_ancestors(pid: int, table: dict[int, ProcessEntry]) -> set[int]:
    line = {0, 1}
    while pid not in line:
        line.add(pid)
        pid = table[pid].parent if pid in table else 0
    return line


def end_processes(belongings: Belongings, deadline_s: float = KILL_DEADLINE_S) -> set[ProcessId]:
    """SIGKILL every process of the run until none is left; return those that outlived the deadline."""
    deadline = time.monotonic() + deadline_s
    while left := belongings.processes():
        _kill_and_wait(left, deadline)
        if time.monotonic() >= deadline:
            return belongings.processes()
    return left


def _kill_and_wait(processes: Iterable[ProcessId], deadline: float) -> None:
    """Signal through pidfds, so that a pid that has come back in between is not hit; return once all have ended."""
    poller = select.poll()
    waiting: set[int] = set()
    try:
        for process in processes:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(process.pid)
                waiting.add(descriptor)
                if start_ticks(process.pid) == process.start_ticks:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poller.register(descriptor, select.POLLIN)
        ended: set[int] = set()
        while len(ended) < len(waiting):
            left_s = deadline - time.monotonic()
            events = poller.poll(left_s * 1000) if left_s > 0 else []
            if not events:
                return
            for descriptor, _ in events:
                poller.unregister(descriptor)
                ended.add(descriptor)
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def clean_up(belongings: Belongings) -> set[ProcessId]:
    """End the run's processes, then remove its folders and segments. Returns the processes that are left."""
    held = {
        path
        for process in belongings.processes()
        for path in open_files(process.pid)
        if path.startswith(tuple(f"{SHM_FOLDER}/{prefix}" for prefix in HELD_SHM_PREFIXES))
    }
    left = end_processes(belongings)
    for folder in belongings.folders:
        shutil.rmtree(folder, ignore_errors=True)
    remove_segments(held, belongings.shm_prefixes)
    return left


def remove_segments(held: set[str], prefixes: set[str]) -> None:
    """Remove segments whose names start with one of `prefixes`, and those of `held` that nobody has open now."""
    in_use: set[str] = set()
    if held:
        in_use = {path for pid in process_table() for path in open_files(pid)}
    doomed = {path for path in held if path not in in_use}
    if prefixes:
        with contextlib.suppress(OSError):
            doomed |= {f"{SHM_FOLDER}/{name}" for name in os.listdir(SHM_FOLDER) if name.startswith(tuple(prefixes))}
    for path in doomed:
        with contextlib.suppress(OSError):
            os.unlink(path)


def serve(driver: int) -> None:
    """The watchdog's life: take notes until the driver releases it or is gone; in the latter case, clean up."""
    belongings = Belongings()
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    try:
        # The pipe alone is not enough: a process the driver forked may hold its other end open.
        driver_gone = os.pidfd_open(driver)
        poller.register(driver_gone, select.POLLIN)
    except OSError:
        driver_gone = -1
    os.write(1, b"ready\n")
    pending = b""
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if 0 in ready:
            data = os.read(0, 65536)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if _note(belongings, json.loads(line)):
                    return
            if not data:
                break
        elif driver_gone in ready:
            break
    clean_up(belongings)


def _note(belongings: Belongings, message: dict[str, object]) -> bool:
    """Apply one message; True for a release."""
    match message:
        case {"op": "pid", "pid": int(pid), "start_ticks": int(ticks)}:
            belongings.roots.add(ProcessId(pid, ticks))
        case {"op": "marker", "name": str(name)}:
            belongings.markers.add(name)
        case {"op": "folder", "path": str(path)}:
            belongings.folders.add(path)
        case {"op": "shm", "prefix": str(prefix)}:
            belongings.shm_prefixes.add(prefix)
        case {"op": "release"}:
            return True
        case _:
            raise ValueError(f"unknown message {message!r}")
    return False


if __name__ == "__main__":
    # A terminal's Ctrl-C, a service manager's SIGTERM and a closed terminal are meant for the driver.
    for _signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(_signal, signal.SIG_IGN)
    serve(int(sys.argv[1]))
