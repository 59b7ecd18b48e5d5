"""However a run is ended, nothing of it is left: no process, no port, no shared memory, no Ray folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.chaos.small_run import (
    QUICKSTART,
    REPOSITORY,
    as_arguments,
    assert_account_adds_up,
    read_events,
    read_summary,
    small,
)
from tests.support.processes import wait_gone

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LIMIT_S = 15.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Traces:
    """What a run occupies while it runs."""

    pids: list[int]
    ports: list[int]
    temporary: set[Path]


def _ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _training(folder: Path, *, ignore_sigint: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`miles train` of a run without an end, once its first step is done."""
    words = as_arguments(small(folder, train__steps=100_000, telemetry__progress="plain", telemetry__plot=True))
    process = subprocess.Popen(
        [sys.executable, "-m", "miles", "train", str(QUICKSTART), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        preexec_fn=_ignore_sigint if ignore_sigint else None,
    )
    assert process.stdout is not None
    try:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("step "):
                break
        else:
            pytest.fail("the run ended before its first step:\n" + "".join(seen))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _temporary() -> set[Path]:
    return set(Path("/tmp").glob("miles-*")) | (set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set())


def _traces(process: subprocess.Popen[str], folder: Path, before: set[Path]) -> Traces:
    children = psutil.Process(process.pid).children(recursive=True)
    urls = [event["url"] for event in read_events(folder) if event["event"] == "EngineLaunched"]
    ports = [port for url in urls if (port := urlsplit(url).port) is not None]
    assert len(ports) == 2 and len(children) > 4, "the run does not look like a run"
    return Traces([child.pid for child in children], ports, _temporary() - before)


def _assert_nothing_left(traces: Traces, deadline_s: float) -> None:
    left = wait_gone(traces.pids, deadline_s)
    assert not left, [psutil.Process(pid).cmdline() for pid in left if psutil.pid_exists(pid)]
    for port in traces.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    assert not {path for path in traces.temporary if path.exists()}


@pytest.mark.parametrize(
    ("number", "ignore_sigint"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_one_signal_stops_the_run(tmp_path: Path, number: signal.Signals, ignore_sigint: bool) -> None:
    """Also where SIGINT was inherited as ignored, as in a shell's background job."""
    folder, before = tmp_path / "run", _temporary()
    with _training(folder, ignore_sigint=ignore_sigint) as process:
        traces = _traces(process, folder, before)
        began = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, output
        _assert_nothing_left(traces, LIMIT_S - (time.monotonic() - began))
    summary = read_summary(folder)
    assert summary["status"] == "stopped" and "error" not in summary
    assert summary["steps"] >= 1
    assert (folder / "curves.png").is_file()
    assert_account_adds_up(summary)


def test_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL of the driver: the watchdog ends the rest."""
    folder, before = tmp_path / "run", _temporary()
    with _training(folder) as process:
        traces = _traces(process, folder, before)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        began = time.monotonic()
        _assert_nothing_left(traces, LIMIT_S)
        assert time.monotonic() - began < LIMIT_S
