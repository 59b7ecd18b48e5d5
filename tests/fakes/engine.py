"""An engine in memory, with gates. Implements controllers.ports.Engine; the contract suite keeps it honest.

    engine.hang("health")             # calls wait until engine.release("health")
    engine.refuse("pause", error)     # calls raise `error` until engine.allow("pause")
    engine.health_script.append(...)  # one answer (EngineHealth), error, or delay in seconds per probe
    engine.exit(-9)                   # the process ends by itself
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel

from controllers.errors import EngineUnreachable, MilesError
from controllers.ports import EngineExit, EngineHealth, LaunchSpec, PauseMode


class FakeEngine:
    """`calls` records (method, arguments...) in order, when they arrive. `running` holds request ids."""

    def __init__(self, spec: LaunchSpec, *, url: str | None = None, pid: int = 1000, ranks: int = 1) -> None:
        self.spec = spec
        self.engine = spec.engine
        self.incarnation = spec.incarnation
        self.url = url or f"http://127.0.0.1:1/{spec.incarnation}"
        self.pid = pid
        self.ranks = ranks
        self.calls: list[tuple[object, ...]] = []
        self.running: set[str] = set()
        self.paused: PauseMode | None = None
        self.weight_version = spec.weight_version
        self.tokens_generated = 0
        self.health_script: deque[EngineHealth | MilesError | float] = deque()
        self.on_load: Callable[[str, bytes], None] | None = None
        self.on_abort: Callable[[str], None] | None = None
        self._gates: dict[str, anyio.Event] = {}
        self._refusals: dict[str, MilesError] = {}
        self._exited = anyio.Event()
        self._exit: EngineExit | None = None

    # -- for the test

    @property
    def alive(self) -> bool:
        return self._exit is None

    def called(self, method: str) -> int:
        """How often `method` was called."""
        return sum(call[0] == method for call in self.calls)

    def exit(self, returncode: int | None, detail: str = "gone") -> None:
        """End the process, as a crash would."""
        if self._exit is None:
            self._exit = EngineExit(returncode, detail)
            self.running.clear()
            self._exited.set()

    def hang(self, method: str) -> None:
        """Make calls of `method` wait until `release(method)`."""
        self._gates[method] = anyio.Event()

    def release(self, method: str) -> None:
        self._gates.pop(method).set()

    def refuse(self, method: str, error: MilesError) -> None:
        """Make calls of `method` raise `error` until `allow(method)`."""
        self._refusals[method] = error

    def allow(self, method: str) -> None:
        self._refusals.pop(method, None)

    # -- controllers.ports.Engine

    async def health(self, timeout_s: float) -> EngineHealth:
        await self._call("health")
        while self.health_script:
            step = self.health_script.popleft()
            if isinstance(step, EngineHealth):
                self.tokens_generated = step.tokens_generated
                return step
            if isinstance(step, MilesError):
                raise step
            await anyio.sleep(step)
        return EngineHealth(self.tokens_generated, len(self.running), self.weight_version)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)
        self._abort(request_id)

    async def abort_all(self) -> None:
        await self._call("abort_all")
        for request_id in sorted(self.running):
            self._abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode)
        self.paused = mode
        if mode == "abort":
            for request_id in sorted(self.running):
                self._abort(request_id)

    async def resume(self) -> None:
        await self._call("resume")
        self.paused = None

    async def call_weight_loader(self, loader: str, manifest: bytes, timeout_s: float) -> None:
        await self._call("call_weight_loader", loader)
        if self.on_load is not None:
            self.on_load(loader, manifest)

    async def set_weight_version(self, label: str) -> None:
        await self._call("set_weight_version", label)
        self.weight_version = label

    async def wait_exit(self) -> EngineExit:
        await self._exited.wait()
        assert self._exit is not None
        return self._exit

    async def stop(self, grace_s: float) -> None:
        self.calls.append(("stop", grace_s))
        await self._pass_gate("stop")
        self.exit(-15, "stopped")

    async def _call(self, method: str, *arguments: object) -> None:
        self.calls.append((method, *arguments))
        await self._pass_gate(method)
        if self._exit is not None:
            raise EngineUnreachable(f"{self.incarnation} is gone", engine=self.engine)
        await anyio.lowlevel.checkpoint()  # a real call always gives others a turn

    async def _pass_gate(self, method: str) -> None:
        gate = self._gates.get(method)
        if gate is not None:
            await gate.wait()
        refusal = self._refusals.get(method)
        if refusal is not None:
            raise refusal

    def _abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.discard(request_id)
            if self.on_abort is not None:
                self.on_abort(request_id)
