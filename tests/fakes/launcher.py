"""A launcher of FakeEngines. Implements controllers.ports.EngineLauncher.

    launcher.fail_next("engine-0", LaunchFailed("no port"), times=2)
    launcher.hang()                  # launches wait until launcher.release()
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import anyio

from controllers.errors import MilesError
from controllers.ports import LaunchSpec
from tests.fakes.engine import FakeEngine


class FakeLauncher:
    """`specs` records every launch asked for, `engines` every engine that came up; a launch takes `launch_s`."""

    def __init__(self, *, launch_s: float = 0.0, make: Callable[[LaunchSpec, int], FakeEngine] | None = None) -> None:
        self.launch_s = launch_s
        self.specs: list[LaunchSpec] = []
        self.engines: list[FakeEngine] = []
        self._make = make or _make
        self._failures: defaultdict[str, deque[MilesError]] = defaultdict(deque)
        self._gate: anyio.Event | None = None

    def fail_next(self, engine: str, error: MilesError, times: int = 1) -> None:
        """Make the next `times` launches of `engine` raise `error`."""
        self._failures[engine].extend([error] * times)

    def hang(self) -> None:
        """Make launches wait until `release()`."""
        self._gate = anyio.Event()

    def release(self) -> None:
        gate, self._gate = self._gate, None
        assert gate is not None
        gate.set()

    def lives(self, engine: str) -> list[FakeEngine]:
        """Every incarnation of `engine` that came up, oldest first."""
        return [each for each in self.engines if each.engine == engine]

    def newest(self, engine: str) -> FakeEngine:
        return self.lives(engine)[-1]

    def alive(self) -> list[FakeEngine]:
        """Engines whose process has not ended."""
        return [each for each in self.engines if each.alive]

    async def launch(self, spec: LaunchSpec) -> FakeEngine:
        self.specs.append(spec)
        await anyio.sleep(self.launch_s)
        if self._gate is not None:
            await self._gate.wait()
        if self._failures[spec.engine]:
            raise self._failures[spec.engine].popleft()
        engine = self._make(spec, 1000 + len(self.engines))
        self.engines.append(engine)
        return engine


def _make(spec: LaunchSpec, pid: int) -> FakeEngine:
    return FakeEngine(spec, pid=pid)
