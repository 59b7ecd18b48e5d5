"""Engines in memory behind a SamplingClient, with faults. A token tells its place, its logprob who sampled it.

The token at position p of a sequence (prompt included) is `FIRST_TOKEN + p`, and its logprob is exactly
`-(p + version / 1024)`: so any hand-over that loses, repeats or re-labels a token shows in the finished sample.

    server = client.serve("http://i0", "i0", version=1, token_s=1.0)
    server.faults.append(Break(after=20))       # the next request: the connection breaks, the engine generates on
    server.die()                                # all connections break
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import anyio
from anyio.lowlevel import checkpoint

from controllers.errors import EngineUnreachable, MilesError
from executors.sampling_client import GenerateRequest, LabelSpan, TokenChunk

FIRST_TOKEN = 1000


def expected_token(position: int) -> int:
    """The token every engine samples at `position` of a sequence, counted from the start of the prompt."""
    return FIRST_TOKEN + position


def logprob_of(position: int, version: int) -> float:
    return -(position + version / 1024)


def version_in(logprob: float, position: int) -> int:
    """The version that sampled the token at `position`, as its logprob tells."""
    return round((-logprob - position) * 1024)


@dataclass(frozen=True)
class Break:
    """The connection breaks after so many tokens; the engine goes on generating until it is told to stop.

    After all its tokens: they arrive, and the word that they were the last does not.
    """

    after: int


@dataclass(frozen=True)
class Hang:
    """No more tokens after so many."""

    after: int


@dataclass(frozen=True)
class Refuse:
    """The request is refused with this error."""

    error: MilesError


@dataclass(frozen=True)
class AbortByEngine:
    """The engine aborts the request after so many tokens, for reasons of its own."""

    after: int


@dataclass(frozen=True)
class Mislabel:
    """The answer is whole, and its label names somebody else."""

    label: str


Fault = Break | Hang | Refuse | AbortByEngine | Mislabel


@dataclass
class _Generation:
    ended: anyio.Event = field(default_factory=anyio.Event)
    how: str = ""


class FakeServer:
    """One server. `live` holds the request ids that are generating, orphans included."""

    def __init__(self, incarnation: str, version: int, token_s: float) -> None:
        self.incarnation = incarnation
        self.version = version
        self.token_s = token_s
        self.labels = True
        self.alive = True
        self.faults: deque[Fault] = deque()
        self.requests: list[GenerateRequest] = []
        self.live: dict[str, _Generation] = {}
        self.aborts: list[str] = []
        self.hang_aborts = False
        self.length_of: Callable[[GenerateRequest], int] | None = None
        """Tokens after which a sequence stops by itself (the whole response, over all requests)."""

    def die(self) -> None:
        """The process ends: every connection breaks."""
        self.alive = False
        for generation in self.live.values():
            generation.how = "died"
            generation.ended.set()
        self.live.clear()


class FakeSamplingClient:
    """`servers` by URL. `on_event` is called after every chunk and every abort."""

    def __init__(self) -> None:
        self.servers: dict[str, FakeServer] = {}
        self.on_event: Callable[[], None] = lambda: None

    def serve(self, url: str, incarnation: str, *, version: int, token_s: float = 0.0) -> FakeServer:
        server = self.servers[url] = FakeServer(incarnation, version, token_s)
        return server

    @property
    def requests(self) -> list[GenerateRequest]:
        """Every request that reached a server."""
        return [request for server in self.servers.values() for request in server.requests]

    async def generate(self, url: str, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        server = self._reach(url)
        fault = server.faults.popleft() if server.faults else None
        if isinstance(fault, Refuse):
            raise fault.error
        server.requests.append(request)
        generation = server.live[request.request_id] = _Generation()
        orphaned = False
        try:
            versions: list[int] = []
            count, natural_end = self._length(server, request)
            for index in range(count):
                if isinstance(fault, Break) and index == fault.after:
                    orphaned = True
                    raise EngineUnreachable(f"{url}: connection reset", url=url)
                if isinstance(fault, AbortByEngine) and index == fault.after:
                    generation.how = "aborted"
                    generation.ended.set()
                await self._tick(server, generation, hang=isinstance(fault, Hang) and index == fault.after)
                if generation.ended.is_set():
                    break
                position = len(request.input_ids) + index
                versions.append(server.version)
                last = index == count - 1 and fault != Break(count)
                yield TokenChunk(
                    (expected_token(position),),
                    (logprob_of(position, server.version),),
                    finish=("stop" if natural_end else "length") if last else None,
                    spans=self._spans(server, versions, fault) if last else (),
                )
                self.on_event()
            if fault == Break(count):
                raise EngineUnreachable(f"{url}: connection reset", url=url)
            if generation.how == "died":
                raise EngineUnreachable(f"{url}: connection closed", url=url)
            if generation.how == "aborted":
                yield TokenChunk((), (), finish="abort", spans=self._spans(server, versions, fault))
        finally:
            if not orphaned:
                server.live.pop(request.request_id, None)

    async def abort(self, url: str, request_id: str) -> None:
        server = self._reach(url)
        if server.hang_aborts:
            await anyio.sleep_forever()
        server.aborts.append(request_id)
        generation = server.live.pop(request_id, None)
        if generation is not None:
            generation.how = "aborted"
            generation.ended.set()
        await checkpoint()
        self.on_event()

    def _reach(self, url: str) -> FakeServer:
        server = self.servers.get(url)
        if server is None or not server.alive:
            raise EngineUnreachable(f"{url}: connection refused", url=url)
        return server

    @staticmethod
    def _length(server: FakeServer, request: GenerateRequest) -> tuple[int, bool]:
        limit = request.sampling.max_new_tokens
        if server.length_of is None:
            return limit, False
        left = max(1, server.length_of(request))
        return min(limit, left), left <= limit

    @staticmethod
    async def _tick(server: FakeServer, generation: _Generation, *, hang: bool) -> None:
        if generation.ended.is_set():
            return
        if hang:
            await generation.ended.wait()
        elif server.token_s:
            with anyio.move_on_after(server.token_s):
                await generation.ended.wait()
        else:
            await checkpoint()

    @staticmethod
    def _spans(server: FakeServer, versions: list[int], fault: Fault | None) -> tuple[LabelSpan, ...]:
        if not server.labels or not versions:
            return ()
        if isinstance(fault, Mislabel):
            return (LabelSpan(fault.label, 0, len(versions)),)
        spans: list[LabelSpan] = []
        for index, version in enumerate(versions):
            label = f"{server.incarnation}:{version}"
            if spans and spans[-1].label == label:
                spans[-1] = LabelSpan(label, spans[-1].start, index + 1)
            else:
                spans.append(LabelSpan(label, index, index + 1))
        return tuple(spans)
