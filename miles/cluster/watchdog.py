"""The driver's side of the watchdog: a process in a session of its own that cleans up when the driver is gone.

    with Watchdog() as watchdog:            # starts the process; leaving the block releases it
        watchdog.watch_folder(ray_folder)

It sees the driver's end in whatever way it comes (SIGKILL included) as the end of a pipe, and then ends what was
recorded and removes it, within 15 s. A driver that leaves the block cleans up itself, so the watchdog does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from controllers.errors import InfrastructureError, WaitTimeout
from miles.cluster import reaper

log = structlog.get_logger(__name__)

START_DEADLINE_S = 10.0
RELEASE_DEADLINE_S = 5.0


class Watchdog:
    """A context manager; what is recorded counts from the call on. Calls after the block are ignored."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the watchdog; 0 when it does not run."""
        return 0 if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        # -I -S: nothing of the environment or site-packages is imported, so it is up in a few hundredths of a second.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            cwd="/",
        )
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_DEADLINE_S)
        if not readable or process.stdout.readline() != b"ready\n":
            process.kill()
            process.communicate()
            if not readable:
                raise WaitTimeout("the watchdog did not start", waited_for="the watchdog", timeout_s=START_DEADLINE_S)
            raise InfrastructureError(f"the watchdog ended at its start with code {process.returncode}")
        self._process = process
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def watch_pid(self, pid: int) -> None:
        """Record a process and all that will descend from it. A pid that is gone is ignored."""
        ticks = reaper.start_ticks(pid)
        if ticks is not None:
            self._send({"op": "pid", "pid": pid, "start_ticks": ticks})

    def watch_marker(self, name: str) -> None:
        """Record every process that was started with the environment variable `name`. Choose one nobody else has."""
        self._send({"op": "marker", "name": name})

    def watch_folder(self, path: Path) -> None:
        """Record a folder that belongs to the run alone; Ray daemons that log into it are ended too."""
        folder = path.resolve()
        if len(folder.parts) < 3 or folder == Path.home().resolve():
            raise ValueError(f"{folder} is no folder to remove")
        self._send({"op": "folder", "path": str(folder)})

    def watch_shm(self, prefix: str) -> None:
        """Record shared-memory segments (`/dev/shm/<prefix>...`). The prefix must be unique to this run."""
        if not prefix or "/" in prefix:
            raise ValueError(f"{prefix!r} is no prefix of segment names")
        self._send({"op": "shm", "prefix": prefix})

    def release(self) -> None:
        """Let it go without cleaning up. Idempotent."""
        process = self._process
        if process is None:
            return
        self._send({"op": "release"})
        self._process = None
        assert process.stdin is not None and process.stdout is not None
        try:
            process.wait(RELEASE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()

    def _send(self, message: dict[str, object]) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            log.warning("watchdog_gone", pid=self._process.pid)
