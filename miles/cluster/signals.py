"""SIGINT and SIGTERM, turned into an orderly stop: the first one calls back once, a second SIGINT ends the process.

A wrapper may pass a terminal's Ctrl-C on, so that one press arrives twice: a SIGINT right after the first is the same
press. Handlers are installed explicitly, because a shell starts background jobs with SIGINT ignored and Python then
leaves it so. They run even while the event loop is busy; after a hard exit the watchdog cleans up.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED_EXIT_CODE = 130
SAME_PRESS_S = 0.3


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SIGTERM while the body runs, also where SIGINT was inherited as ignored.

    For the seconds of imports before `StopSignals` takes over; entered in the main thread.
    """
    previous = {number: signal.signal(number, signal.default_int_handler) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def reinstall_handlers() -> None:
    """Put Python's handlers back under the kernel's table, after a library's native code replaced one.

    Ray's does so for SIGTERM: its handler calls ours on, but aborts the process 3 s later. Does nothing off the main
    thread, where nobody can.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _STOPPING:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)


class StopSignals:
    """An async context manager, entered in the main thread, that calls `on_stop(signal)` in the event loop once."""

    def __init__(self, on_stop: Callable[[signal.Signals], object]) -> None:
        self._on_stop = on_stop
        self._previous: dict[signal.Signals, Any] = {}
        self._received_at = 0.0
        self.received: signal.Signals | None = None
        """The signal that asked for the stop, or None."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in _STOPPING:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.received is None:
            self.received = received
            self._received_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._on_stop, received)
        elif received is signal.SIGINT and time.monotonic() - self._received_at > SAME_PRESS_S:
            sys.stderr.write("\ninterrupted twice: exit without an orderly stop\n")
            sys.stderr.flush()
            os._exit(INTERRUPTED_EXIT_CODE)
