from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controllers.errors import LaunchFailed
from miles.engines.process import EngineProcess, ProcessSpec
from tests.support.file_watch import when_written
from tests.support.processes import wait_gone, wait_gone_async

pytestmark = pytest.mark.real

_WAIT = "import threading; threading.Event().wait()"


def _spec(tmp_path: Path, code: str) -> ProcessSpec:
    return ProcessSpec((sys.executable, "-I", "-S", "-c", code), tmp_path / "engine.log")


async def test_its_end_is_noticed_at_once_and_its_last_words_are_kept(tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("of an earlier life\n")
    process = await EngineProcess.start(_spec(tmp_path, "print('x' * 9000); print('last words'); raise SystemExit(7)"))
    assert await asyncio.wait_for(process.wait(), 10) == 7
    assert process.tail().endswith("last words") and len(process.tail()) <= 4096
    assert "earlier life" not in process.tail()


async def test_a_sigkill_is_seen_within_half_a_second(tmp_path: Path) -> None:
    process = await EngineProcess.start(_spec(tmp_path, _WAIT))
    waiting = asyncio.create_task(process.wait())
    await asyncio.sleep(0)
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    assert await waiting == -signal.SIGKILL
    assert time.monotonic() - killed < 0.5


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_stop_ends_one_that_ignores_sigterm(tmp_path: Path, grace_s: float) -> None:
    """Fails without the `kill` in `stop`."""
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); {_WAIT}"
    process = await EngineProcess.start(_spec(tmp_path, code))
    await _printed(tmp_path, process, "set")
    assert await process.stop(grace_s) == -signal.SIGKILL
    assert await process.stop(grace_s) == -signal.SIGKILL


async def test_stop_lets_it_leave_in_order(tmp_path: Path) -> None:
    leave = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    code = f"import signal, sys; {leave}; print('set', flush=True); {_WAIT}"
    process = await EngineProcess.start(_spec(tmp_path, code))
    await _printed(tmp_path, process, "set")
    assert await process.stop(10) == 5


@pytest.mark.parametrize("how", ["crash", "stop"])
async def test_its_children_go_with_it(tmp_path: Path, how: str) -> None:
    """Fails without the `killpg` in `_live`: the child would be an orphan with the parent's memory and ports."""
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {_WAIT!r}])\n"
        "print('child', child.pid, flush=True)\n"
        f"{_WAIT}"
    )
    process = await EngineProcess.start(_spec(tmp_path, code))
    child = int((await _printed(tmp_path, process, "child")).split()[1])
    if how == "crash":
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    else:
        await process.stop(0)
    assert await wait_gone_async([child], 5) == []


async def test_a_command_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    process = await EngineProcess.start(ProcessSpec(("/no/such/program",), tmp_path / "engine.log"))
    assert await process.wait() != 0
    assert "/no/such/program" in process.tail()
    (tmp_path / "file").touch()
    with pytest.raises(LaunchFailed):
        await EngineProcess.start(ProcessSpec(("true",), tmp_path / "file" / "engine.log"))


async def test_cancelling_a_start_leaves_no_process(tmp_path: Path) -> None:
    """Fails without the done callback in `start`."""
    note = tmp_path / "pid"
    code = f"import os; open({str(note)!r}, 'w').write(str(os.getpid())); {_WAIT}"
    starting = asyncio.create_task(EngineProcess.start(_spec(tmp_path, code)))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    marker = str(note).encode()
    for _ in range(2):  # the thread reports the start to the loop, which then kills
        await asyncio.to_thread(lambda: None)
    left = [int(name) for name in os.listdir("/proc") if name.isdigit() and marker in _cmdline(int(name))]
    assert await wait_gone_async(left, 5) == []


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Fails without die_with_parent.py."""
    code = f"""
import asyncio, sys
from pathlib import Path
from miles.engines.process import EngineProcess, ProcessSpec
from tests.support.file_watch import when_written

async def main():
    argv = (sys.executable, "-I", "-S", "-c", "print('up', flush=True);" {_WAIT!r})
    process = await EngineProcess.start(ProcessSpec(argv, Path({str(tmp_path / "engine.log")!r})))
    await when_written(Path({str(tmp_path)!r}), lambda: process.tail() == "up" or None)
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        host.kill()
        assert wait_gone([pid], 5) == []


async def _printed(folder: Path, process: EngineProcess, word: str) -> str:
    """The line with `word`, once it is in the log."""

    def look() -> str | None:
        return next((line for line in process.tail().splitlines() if word in line), None)

    return await when_written(folder, look)
