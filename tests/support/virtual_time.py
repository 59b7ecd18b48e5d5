"""A test event loop whose clock jumps to the next timer when nothing else is left to do.

Sixty seconds of backoff take milliseconds, and take exactly sixty seconds by `anyio.current_time()`. Product code
uses plain anyio clocks and knows nothing of it. Threads and sockets are not waited for while a timer is set.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

_STALL_S = 5.0
"""Real seconds to wait for a thread or socket when no timer is set at all, before the test is called stuck."""


class VirtualTimeStuck(AssertionError):
    """Nothing in the test can go on: a wait without a deadline or a waker, or a loop that never ends."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, in seconds from 0. `limit_s` ends a test that runs for ever."""

    def __init__(self, limit_s: float = 86_400.0) -> None:
        self._virtual_now = 0.0
        self._limit_s = limit_s
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_now

    def _jump(self, seconds: float) -> None:
        self._virtual_now += seconds
        if self._virtual_now > self._limit_s:
            raise VirtualTimeStuck(f"the test did not end within {self._limit_s} virtual seconds")


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would sleep for `timeout` seconds, the clock jumps instead."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self._jump(timeout)
            return ready
        ready = super().select(_STALL_S)
        if not ready:
            raise VirtualTimeStuck("every task waits and no timer is set: something has no deadline and no waker")
        return ready


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run `async def test_...` as a plain test on a VirtualTimeLoop."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
