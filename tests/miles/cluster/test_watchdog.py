from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.cluster.watchdog import Watchdog
from tests.support.processes import wait_gone

pytestmark = pytest.mark.real

_DRIVER = """
import os, subprocess, sys, threading
from pathlib import Path
from miles.cluster.watchdog import Watchdog
how, folder = sys.argv[1], Path(sys.argv[2])
with Watchdog() as watchdog:
    def start():
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import threading; threading.Event().wait()"])
    recorded, unrecorded = start(), start()
    watchdog.watch_pid(recorded.pid)
    watchdog.watch_folder(folder)
    if how == "fork":
        forked = os.fork()
        if forked == 0:
            threading.Event().wait()
    else:
        forked = 0
    print(watchdog.pid, recorded.pid, unrecorded.pid, forked, flush=True)
    sys.stdin.readline()
"""


@dataclass
class Driver:
    """A driver and what it started; `forked` is a child that holds a copy of the watchdog's pipe, or 0."""

    process: subprocess.Popen[str]
    watchdog: int
    recorded: int
    unrecorded: int
    forked: int


@contextlib.contextmanager
def _driver(how: str, folder: Path) -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, how, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    try:
        yield Driver(process, *pids)
    finally:
        process.kill()
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_killed_driver_is_cleaned_up_after_and_nothing_else_is_touched(tmp_path: Path) -> None:
    """Fails without the end-of-file branch of `serve`, and when descendants of the driver are taken for its own."""
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "log").touch()
    with _driver("kill", folder) as driver:
        os.kill(driver.watchdog, signal.SIGINT)
        os.kill(driver.watchdog, signal.SIGTERM)
        driver.process.kill()
        assert wait_gone([driver.recorded, driver.watchdog], 15) == []
        assert not folder.exists()
        assert wait_gone([driver.unrecorded], 0) == [driver.unrecorded]


def test_a_driver_that_leaves_in_order_finds_its_things_as_it_left_them(tmp_path: Path) -> None:
    with _driver("leave", tmp_path) as driver:
        assert driver.process.stdin is not None
        driver.process.stdin.write("\n")
        driver.process.stdin.flush()
        assert driver.process.wait(15) == 0
        assert wait_gone([driver.watchdog], 5) == []
        assert wait_gone([driver.recorded], 0) == [driver.recorded]
        assert tmp_path.exists()


def test_a_forked_child_that_keeps_the_pipe_open_hides_nothing(tmp_path: Path) -> None:
    """Fails without the pidfd in `serve`: the pipe's end would not come."""
    with _driver("fork", tmp_path) as driver:
        driver.process.kill()
        assert wait_gone([driver.recorded, driver.watchdog], 15) == []


def test_it_holds_no_descriptor_of_the_driver_but_its_pipe() -> None:
    with socket.create_server(("127.0.0.1", 0)), Watchdog() as watchdog:
        kept = {os.readlink(f"/proc/{watchdog.pid}/fd/{name}") for name in os.listdir(f"/proc/{watchdog.pid}/fd")}
        assert not {path for path in kept if path.startswith(("socket:", "/dev/pts"))}
        assert os.getsid(watchdog.pid) == watchdog.pid


@pytest.mark.parametrize("path", ["/", "/tmp", "~"])
def test_folders_that_cannot_be_a_runs_own_are_refused(path: str) -> None:
    with Watchdog() as watchdog, pytest.raises(ValueError, match="no folder to remove"):
        watchdog.watch_folder(Path(path).expanduser())


def _start_ray_driver(folder: Path, *words: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.support.watched_driver", str(folder), *words], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    return driver, json.loads(_json_line(driver))


def _json_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("{"):
            return line
    raise AssertionError(f"the driver ended with code {driver.wait()}")


def _leftovers(report: dict[str, Any]) -> list[str]:
    taken = []
    for port in report["ports"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                taken.append(f"port {port}")
    return taken + [path for path in (report["folder"], report["segment"]) if Path(path).exists()]


def test_sigkill_of_a_driver_with_ray_and_an_engine_leaves_nothing(tmp_path: Path) -> None:
    """Fails without the watchdog: Ray's agents live on for a minute, and its folder for ever."""
    driver, report = _start_ray_driver(tmp_path)
    assert len(report["pids"]) > 8 and report["engine"] in report["pids"] and len(report["ports"]) > 3
    driver.kill()
    assert wait_gone(report["pids"], 15) == []
    assert _leftovers(report) == []
    driver.communicate()


def test_a_run_that_leaves_in_order_leaves_nothing(tmp_path: Path) -> None:
    """Fails without `RayCluster._sweep`: Ray's folder stays, and its agents for seconds."""
    driver, report = _start_ray_driver(tmp_path, "leave")
    assert driver.wait(60) == 0
    assert wait_gone(report["pids"], 0) == []
    assert _leftovers(report) == []
    driver.communicate()
