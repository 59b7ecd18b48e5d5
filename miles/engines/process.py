"""One engine's process: started so that it dies with its host, watched without polling, ended with its whole group.

Three guards, for three ways to lose a process: the kernel kills it when the thread that started it ends (that thread
lives as long as the process); a leader that has ended takes the rest of its process group along before it is reaped,
so that the group's id cannot have been given to somebody else; `stop` goes from SIGTERM to SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from controllers.errors import LaunchFailed
from miles.cluster import die_with_parent

TAIL_BYTES = 4096
KILL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A command, what it adds to the environment, and the file that takes its output (appended to)."""

    argv: Sequence[str]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)


class EngineProcess:
    """A running (or ended) process. Made by `start`; belongs to the event loop that started it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int] = self._loop.create_future()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._log_start = 0
        self._lock = threading.Lock()  # held while the group is signalled, so that it is not reaped in between
        self._reaped = False

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Self:
        """Start it. Raises LaunchFailed when the command cannot be run at all. Cancelling leaves no process."""
        process = cls(spec)
        thread = threading.Thread(target=process._live, name=f"engine {spec.log_path.stem}", daemon=True)
        thread.start()
        try:
            await asyncio.shield(process._started)
        except asyncio.CancelledError:
            process._started.add_done_callback(lambda started: started.exception() or process.kill())
            raise
        return process

    @property
    def pid(self) -> int:
        """Process id; also the id of its session and process group."""
        return self._started.result()

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._exited.result() if self._exited.done() else None

    async def wait(self) -> int:
        """Return its return code once it has ended; by then its process group has ended too."""
        return await asyncio.shield(self._exited)

    def when_ended(self, action: Callable[[], object]) -> None:
        """Call `action` in the event loop once it has ended."""
        self._exited.add_done_callback(lambda _: action())

    def kill(self) -> None:
        """SIGKILL the process group at once."""
        self._signal_group(signal.SIGKILL)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; return the return code. Harmless when it has ended."""
        if grace_s > 0:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        return await asyncio.wait_for(self.wait(), KILL_DEADLINE_S)

    def tail(self) -> str:
        """The last of what this process printed, 4 KiB at most."""
        with contextlib.suppress(OSError), open(self._spec.log_path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""

    def _live(self) -> None:
        """The thread that is the process's parent to the kernel: it must not end before the process does."""
        try:
            process = self._spawn()
        except OSError as error:
            failure = LaunchFailed(f"cannot run {self._spec.argv[0]!r}: {error}")
            self._tell(lambda: self._started.set_exception(failure))
            return
        pid = process.pid
        self._tell(lambda: self._started.set_result(pid))
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            returncode = process.wait()
            self._reaped = True
        self._tell(lambda: self._exited.set_result(returncode))

    def _spawn(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(spec.log_path, "ab") as log_file:
            # The process writes straight to the file: a host that hangs or dies never blocks it on a full pipe.
            self._log_start = log_file.tell()
            return subprocess.Popen(
                [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )

    def _tell(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(action)

    def _signal_group(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
