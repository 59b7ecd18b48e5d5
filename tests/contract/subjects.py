"""What the contract suite runs over: the same engine port with the same means to make it work, fake and real."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from controllers.ports import Engine, LaunchSpec
from executors.sampling_client import GenerateRequest, SamplingParams, TokenChunk
from miles.engines.host import EngineHost, HostedEngine, HostRequest
from miles.engines.launcher import ServedEngine
from miles.engines.sglang_client import SGLangClient
from tests.fakes.engine import FakeEngine
from tests.support import recording_loader
from tests.support.embedded_server import CONTEXT_LENGTH, LABEL, RunningServer, embedded_command

SPEC = LaunchSpec("engine-0", "engine-0.1", LABEL)
PROMPT = (1, 2, 3, 4)


class Subject(Protocol):
    """An engine, requests on it, and what its weight loader was given."""

    engine: Engine
    loader: str

    async def begin(self, *request_ids: str) -> None:
        """Start long generations; return when each runs."""

    async def live(self) -> set[str]:
        """Ids of requests that have not ended."""

    def manifest(self, content: bytes) -> bytes: ...

    def loaded(self) -> list[bytes]:
        """Manifests that the loader got, in order."""

    async def crash(self) -> None:
        """End the engine's process by force."""


class FakeSubject:
    """tests.fakes.engine.FakeEngine."""

    loader = "pkg.module.load"

    def __init__(self) -> None:
        self.fake = FakeEngine(SPEC)
        self.engine: Engine = self.fake
        self._loaded: list[bytes] = []
        self.fake.on_load = lambda loader, manifest: self._loaded.append(manifest)

    async def begin(self, *request_ids: str) -> None:
        self.fake.running |= set(request_ids)

    async def live(self) -> set[str]:
        return set(self.fake.running)

    def manifest(self, content: bytes) -> bytes:
        return content

    def loaded(self) -> list[bytes]:
        return self._loaded

    async def crash(self) -> None:
        self.fake.exit(-9)


class LocalHost:
    """An EngineHost in this process, called as if it were an actor."""

    def __init__(self) -> None:
        self._host = EngineHost()

    async def call(self, method: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        async with asyncio.timeout(timeout_s):
            return await getattr(self._host, method)(*args)

    def kill(self) -> None:
        pass


class ServerSubject:
    """A server that speaks SGLang's HTTP API, through the client."""

    loader = recording_loader.PATH

    def __init__(self, engine: ServedEngine, client: SGLangClient, note: Path) -> None:
        self.engine: Engine = engine
        self.client = client
        self.requests: dict[str, Generation] = {}
        self._note = note

    async def begin(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.requests[request_id] = Generation(self.client, self.engine.url, request_id)
        for request_id in request_ids:
            await self.requests[request_id].first_token.wait()

    async def live(self) -> set[str]:
        return {request_id for request_id, generation in self.requests.items() if not await generation.settled()}

    def manifest(self, content: bytes) -> bytes:
        return str(self._note).encode() + b"\0" + content

    def loaded(self) -> list[bytes]:
        if not self._note.exists():
            return []
        return [bytes.fromhex(line) for line in self._note.read_text().splitlines()]

    async def crash(self) -> None:
        os.kill(self.engine.pid, signal.SIGKILL)

    async def close(self) -> None:
        for generation in self.requests.values():
            generation.task.cancel()
        await asyncio.gather(*(generation.task for generation in self.requests.values()), return_exceptions=True)


class Generation:
    """One streamed request, read in a task."""

    def __init__(self, client: SGLangClient, url: str, request_id: str) -> None:
        self.chunks: list[TokenChunk] = []
        self.first_token = asyncio.Event()
        self._more = asyncio.Event()
        budget = CONTEXT_LENGTH - len(PROMPT)
        request = GenerateRequest(request_id, PROMPT, SamplingParams(budget), "engine-0.1:none")
        self.task = asyncio.create_task(self._read(client, url, request))

    @property
    def ended(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish is not None

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def more(self, tokens: int) -> None:
        """Return when that many more tokens have come, or the last one."""
        goal = self.tokens + tokens
        async with asyncio.timeout(20):
            while self.tokens < goal and not self.ended:
                self._more.clear()
                await self._more.wait()

    async def settled(self) -> bool:
        """Whether it has ended. It goes on otherwise, which shows when a few more tokens come."""
        await self.more(3)
        return self.ended

    async def _read(self, client: SGLangClient, url: str, request: GenerateRequest) -> None:
        async for chunk in client.generate(url, request):
            self.chunks.append(chunk)
            self.first_token.set()
            self._more.set()


@asynccontextmanager
async def shared_server(server: RunningServer, note: Path) -> AsyncIterator[ServerSubject]:
    """A server that other tests use too: left as it was found."""
    async with SGLangClient() as client:
        info = await client.server_info(server.url)
        engine = ServedEngine(SPEC, HostedEngine(server.url, server.pid, 0, info), LocalHost(), client)
        subject = ServerSubject(engine, client, note)
        try:
            yield subject
        finally:
            await engine.abort_all()
            await engine.resume()
            await engine.set_weight_version(LABEL)
            await subject.close()


@asynccontextmanager
async def own_server(folder: Path) -> AsyncIterator[ServerSubject]:
    """A server of the test's own, supervised by an EngineHost."""
    host = LocalHost()
    request = HostRequest("engine-0", embedded_command(folder), LABEL, "127.0.0.1", folder / "engine.log", 100.0)
    async with SGLangClient() as client:
        hosted = await host.call("start", request)
        engine = ServedEngine(SPEC, hosted, host, client)
        subject = ServerSubject(engine, client, folder / "note")
        try:
            yield subject
        finally:
            await engine.stop(0)
            await subject.close()
