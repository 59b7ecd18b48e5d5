from __future__ import annotations

import asyncio
import contextlib
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from miles.cluster import signals

pytestmark = pytest.mark.real

_CHILD = """
import signal, sys
if "ignored" in sys.argv:
    print("was", signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True)
import anyio
from miles.cluster.signals import StopSignals

async def main():
    with anyio.CancelScope() as scope:
        async with StopSignals(lambda received: scope.cancel()) as signals:
            print("ready", flush=True)
            try:
                await anyio.sleep_forever()
            finally:
                print("stopping", signals.received.name, flush=True)
                if "hang" in sys.argv:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep_forever()
                if "busy" in sys.argv:
                    while True:
                        pass
    print("stopped", flush=True)

anyio.run(main)
"""


@contextlib.contextmanager
def _start(*words: str, ignore_sigint: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignore_sigint else None,
    )
    try:
        if ignore_sigint:
            assert _line(process) == "was True"
        assert _line(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[bytes]) -> str:
    """The next line it prints, within 20 s."""
    assert process.stdout is not None
    # Unbuffered, so that what `select` sees is all there is.
    readable, _, _ = select.select([process.stdout], [], [], 20)
    assert readable, "it printed nothing"
    return process.stdout.readline().decode().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_order(number: signal.Signals) -> None:
    with _start() as process:
        process.send_signal(number)
        assert _line(process) == f"stopping {number.name}"
        assert _line(process) == "stopped"
        assert process.wait(10) == 0


def test_sigint_stops_also_where_it_was_inherited_as_ignored() -> None:
    """Fails without the explicit `signal.signal` of StopSignals: Python leaves an ignored SIGINT ignored."""
    with _start("ignored", ignore_sigint=True) as process:
        process.send_signal(signal.SIGINT)
        assert _line(process) == "stopping SIGINT"
        assert process.wait(10) == 0


@pytest.mark.parametrize("stuck", ["hang", "busy"])
def test_a_second_sigint_ends_a_stop_that_hangs(stuck: str) -> None:
    """Fails without the `os._exit`; with handlers of the event loop it would fail where the loop is busy."""
    with _start(stuck) as process:
        process.send_signal(signal.SIGINT)
        assert _line(process) == "stopping SIGINT"
        while process.poll() is None:  # one sent too soon counts as the same press
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 130


@pytest.mark.parametrize(("same_press_s", "exits"), [(1000.0, []), (0.0, [130])])
async def test_sigint_twice_at_once_is_one_press(
    monkeypatch: pytest.MonkeyPatch, same_press_s: float, exits: list[int]
) -> None:
    """Fails without SAME_PRESS_S: a wrapper that passes Ctrl-C on would turn every stop into a hard exit."""
    exited: list[int] = []
    monkeypatch.setattr("os._exit", exited.append)
    monkeypatch.setattr(signals, "SAME_PRESS_S", same_press_s)
    stops: list[signal.Signals] = []
    async with signals.StopSignals(stops.append) as installed:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        assert installed.received is signal.SIGINT
    assert (stops, exited) == ([signal.SIGINT], exits)
    assert signal.getsignal(signal.SIGINT) != installed._handle


_LOADING = """
import signal
from miles.cluster.signals import interruptible

try:
    with interruptible():
        print("ready", flush=True)
        signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""

_WITH_RAY = """
import os, signal
import anyio
from miles.cluster.ray_cluster import RayCluster, RayOptions
from miles.cluster.signals import StopSignals
from miles.cluster.watchdog import Watchdog

async def main():
    with anyio.CancelScope() as scope:
        async with StopSignals(lambda received: scope.cancel()):
            with Watchdog() as watchdog:
                async with RayCluster(RayOptions(), watchdog):
                    os.kill(os.getpid(), signal.SIGTERM)
                    try:
                        await anyio.sleep_forever()
                    finally:
                        with anyio.CancelScope(shield=True):
                            await anyio.sleep(3.5)  # the work of an orderly stop, longer than Ray's alarm
    print("stopped", flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_is_not_lost(number: signal.Signals) -> None:
    """Fails without `interruptible`: an inherited SIG_IGN loses SIGINT, and SIGTERM kills without a word."""
    with subprocess.Popen(
        [sys.executable, "-c", _LOADING],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
    assert (output, process.returncode) == ("interrupted\n", 0)


def test_ray_does_not_abort_an_orderly_stop() -> None:
    """Fails without `reinstall_handlers` in RayCluster: Ray's own handler aborts the process 3 s after SIGTERM."""
    done = subprocess.run([sys.executable, "-c", _WITH_RAY], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("stopped\n", 0), done.stderr[-2000:]
