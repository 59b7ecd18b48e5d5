from __future__ import annotations

import asyncio
import base64
import gc
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import orjson
import pytest
from aiohttp import web

from controllers.errors import EngineRejected, EngineUnreachable
from executors.sampling_client import GenerateRequest, LabelSpan, SamplingClient, SamplingParams, TokenChunk
from executors.sampling_record import RoutingReport
from miles.cluster.urls import host_url
from miles.engines.sglang_client import ClientOptions, SGLangClient

pytestmark = pytest.mark.real

REQUEST = GenerateRequest("a" * 16, (1, 2, 3), SamplingParams(4, stop_token_ids=(9,)), "engine-0.1:7")


class Server:
    """A scripted server. `events` are what `/generate` sends; `bodies` what was asked, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.events: list[bytes] = []
        self.cut_short = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.status: dict[str, int] = {}
        self.bodies: list[tuple[str, Any]] = []
        self.connections: set[object] = set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        self.bodies.append((request.path, orjson.loads(await request.read() or b"null")))
        status = self.status.get(request.path, 200)
        if status != 200:
            return web.Response(status=status, text=f"no {request.path} here")
        if request.path == "/generate":
            return await self._stream(request)
        await self.hold.wait()
        return web.json_response({"tokens_generated": 5, "running": 2, "weight_version": "engine-0.1:7"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(event)
            await asyncio.sleep(0)
            await self.hold.wait()
        if self.cut_short:
            assert request.transport is not None
            request.transport.abort()
        return response

    def called(self) -> list[str]:
        return [path for path, _ in self.bodies]


@asynccontextmanager
async def serving(address: str = "127.0.0.1") -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, address, 0).start()
    server.url = host_url(address, runner.addresses[0][1])
    try:
        yield server
    finally:
        server.hold.set()
        await runner.cleanup()


def event(tokens: list[int], total: int, finish: str | None = None, **meta: object) -> bytes:
    """One event as SGLang sends it: `tokens` are all so far, or the new ones."""
    body = {
        "output_ids": tokens,
        "meta_info": {
            "completion_tokens": total,
            "cached_tokens": 3,
            "finish_reason": None if finish is None else {"type": finish},
            "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
            **meta,
        },
    }
    return b"data: " + orjson.dumps(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
SPANS = [{"version": "engine-0.1:7", "start": 0, "end": 3}, {"version": "engine-0.1:8", "start": 3, "end": 4}]


async def collect(client: SamplingClient, url: str) -> list[TokenChunk]:
    return [chunk async for chunk in client.generate(url, REQUEST)]


@pytest.mark.parametrize(
    "events",
    [
        [event([1, 2], 2), event([1, 2, 3], 3), event([1, 2, 3, 4], 4, "length", weight_versions=SPANS), DONE],
        [event([1, 2], 2), event([3], 3), event([4], 4, "length", weight_versions=SPANS), DONE],
        [event([1, 2], 2), event([3], 3), event([4], 4), event([], 4, "length", weight_versions=SPANS), DONE],
    ],
    ids=["all so far", "new ones", "finish alone"],
)
@pytest.mark.parametrize("cut", [None, 7, 100000], ids=["an event a packet", "7 bytes a packet", "one packet"])
async def test_each_token_comes_once_in_either_style_and_any_packets(events: list[bytes], cut: int | None) -> None:
    """Fails when new tokens are not told by `completion_tokens`, or a packet is taken for an event."""
    async with serving() as server, SGLangClient() as client:
        whole = b"".join(events)
        server.events = events if cut is None else [whole[i : i + cut] for i in range(0, len(whole), cut)]
        chunks = await collect(client, server.url)
    assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4]
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.1, -0.2, -0.3, -0.4]
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"]
    assert chunks[-1].spans == (LabelSpan("engine-0.1:7", 0, 3), LabelSpan("engine-0.1:8", 3, 4))
    assert chunks[-1].cached_tokens == 3


async def test_what_is_asked_for() -> None:
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1], 1, "stop"), DONE]
        await collect(client, server.url)
    [(path, body)] = server.bodies
    assert path == "/generate"
    assert body["rid"] == "a" * 16 and body["input_ids"] == [1, 2, 3] and body["cache_salt"] == "engine-0.1:7"
    assert body["stream"] is True and body["return_logprob"] is True
    assert body["sampling_params"]["max_new_tokens"] == 4 and body["sampling_params"]["stop_token_ids"] == [9]


@pytest.mark.parametrize("style", ["all so far", "new ones"])
async def test_kept_tokens_come_with_the_logprobs_within_them(style: str) -> None:
    """Fails when masks are not cut to the new tokens as logprobs are, or full-vocabulary logprobs are taken."""
    masks, values = [[1, 8], [2], [3, 7, 9]], [-0.5, 0.0, -0.25]

    def told(first: int, end: int) -> dict[str, Any]:
        start = 0 if style == "all so far" else first
        return {
            "output_token_sampling_mask": masks[start:end],
            "output_token_sampling_logprobs": values[start:end],
        }

    first = 0 if style == "all so far" else 2
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1, 2], 2, **told(0, 2)), event([1, 2, 3][first:], 3, "length", **told(2, 3)), DONE]
        asked = replace(REQUEST, sampling=replace(REQUEST.sampling, return_sampling_mask=True))
        chunks = [chunk async for chunk in client.generate(server.url, asked)]
    assert server.bodies[0][1]["return_sampling_mask"] is True
    assert [list(ids) for chunk in chunks for ids in chunk.kept or ()] == masks
    assert [value for chunk in chunks for value in chunk.logprobs] == values


async def test_routed_experts_of_the_finished_answer() -> None:
    """int32 becomes int16, -1 stays -1, and the first row is the one that was asked for."""
    experts = [0, 255, 256, -1, 7, 300]  # two each of input tokens 2, 3 and 4: a prompt of 3, and 3 new tokens
    encoded = base64.b64encode(array("i", experts).tobytes()).decode()
    async with serving() as server, SGLangClient() as client:
        last = event([1, 2, 3], 3, "length", prompt_tokens=3, routed_experts=encoded)
        server.events = [event([1, 2], 2), last, DONE]
        sampling = replace(REQUEST.sampling, return_routed_experts=True)
        asked = replace(REQUEST, sampling=sampling, routing_from=2)
        chunks = [chunk async for chunk in client.generate(server.url, asked)]
        server.events = [event([1], 1, "stop", prompt_tokens=3, routed_experts="AAAA"), DONE]
        with pytest.raises(EngineUnreachable, match="cannot be read"):
            await collect(client, server.url)
    body = server.bodies[0][1]
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 2
    assert [chunk.routing for chunk in chunks] == [None, RoutingReport(2, 3, array("h", experts).tobytes())]


async def test_nothing_is_asked_for_that_is_not_wanted() -> None:
    """Older servers and the embedded engine refuse what they do not know."""
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1], 1, "stop"), DONE]
        [chunk] = await collect(client, server.url)
    assert not {"return_sampling_mask", "return_routed_experts", "routed_experts_start_len"} & set(server.bodies[0][1])
    assert chunk.kept is None and chunk.routing is None


async def test_one_connection_serves_one_request_after_the_other() -> None:
    """Fails when the stream is not read to its end (`_finish`): each request would open a connection."""
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1], 1, "stop"), DONE]
        for _ in range(5):
            await collect(client, server.url)
        assert len(server.connections) == 1


async def test_an_aborted_request_that_gives_tokens_back_ends_without_new_ones() -> None:
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1, 2], 2), event([1], 1, "abort"), DONE]
        chunks = await collect(client, server.url)
    assert [chunk.token_ids for chunk in chunks] == [(1, 2), ()]
    assert chunks[-1].finish == "abort"


@pytest.mark.parametrize("cut_short", [True, False], ids=["connection reset", "answer ended"])
async def test_an_answer_that_ends_early_keeps_its_tokens_and_raises(cut_short: bool) -> None:
    async with serving() as server, SGLangClient() as client:
        server.events, server.cut_short = [event([1, 2], 2)], cut_short
        stream = client.generate(server.url, REQUEST)
        assert (await anext(stream)).token_ids == (1, 2)
        with pytest.raises(EngineUnreachable):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_no_server_and_refusals() -> None:
    async with serving() as server, SGLangClient() as client:
        gone = server.url
        server.status = {"/generate": 400, "/abort_request": 503}
        with pytest.raises(EngineRejected, match="no /generate here") as refused:
            await collect(client, server.url)
        assert refused.value.status == 400
        with pytest.raises(EngineRejected) as refused:
            await client.abort(server.url, "x")
        assert refused.value.status == 503
    async with SGLangClient() as client:
        with pytest.raises(EngineUnreachable):
            await collect(client, gone)
        with pytest.raises(EngineUnreachable):
            await client.health(gone, 1)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', EngineRejected),
        (b"data: {}\n\n", EngineUnreachable),
        (b"data: [1\n\n", EngineUnreachable),
        (event([1], 3), EngineUnreachable),
    ],
    ids=["error", "empty", "no JSON", "tokens missing"],
)
async def test_events_that_are_no_tokens(sent: bytes, error: type[Exception]) -> None:
    async with serving() as server, SGLangClient() as client:
        server.events = [sent]
        with pytest.raises(error):
            await collect(client, server.url)


async def test_leaving_a_stream_early_needs_no_closing() -> None:
    """A break, a cancellation and a close: no warning, no exception, and the session still works."""
    async with serving() as server, SGLangClient() as client:
        server.events = [event([1], 1), event([2], 2, "stop"), DONE]
        server.hold.clear()
        async for _ in client.generate(server.url, REQUEST):
            break
        gc.collect()
        stream = client.generate(server.url, REQUEST)
        await anext(stream)
        with anyio.move_on_after(0.05) as scope:
            await anext(stream)
        assert scope.cancelled_caught
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        stream.close()
        server.hold.set()
        assert len(await collect(client, server.url)) == 2
        unused = client.generate(server.url, REQUEST)
        unused.close()


async def test_silence_within_a_stream_has_a_deadline_where_one_is_asked_for() -> None:
    async with serving() as server, SGLangClient(ClientOptions(chunk_timeout_s=0.1)) as client:
        server.events = [event([1], 1), DONE]
        server.hold.clear()
        stream = client.generate(server.url, REQUEST)
        await anext(stream)
        with pytest.raises(EngineUnreachable, match="in time"):
            await anext(stream)


Control = Callable[[SGLangClient, str], Awaitable[object]]


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda client, url: client.abort(url, "r"), "/abort_request", {"rid": "r", "abort_all": False}),
        (lambda client, url: client.abort_all(url), "/abort_request", {"rid": "", "abort_all": True}),
        (lambda client, url: client.pause(url, "in_place"), "/pause_generation", {"mode": "in_place"}),
        (lambda client, url: client.resume(url), "/continue_generation", {}),
        (
            lambda client, url: client.set_weight_version(url, "e:1"),
            "/update_weight_version",
            {"new_version": "e:1", "abort_all_requests": False},
        ),
    ],
)
async def test_control_calls(call: Control, path: str, body: object) -> None:
    """O23: fails when `abort_all_requests` is left to the server's default."""
    async with serving() as server, SGLangClient() as client:
        await call(client, server.url)
    assert server.bodies == [(path, body)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_health_tells_progress(address: str) -> None:
    async with serving(address) as server, SGLangClient() as client:
        health = await client.health(server.url, 1)
    assert (health.tokens_generated, health.running, health.weight_version) == (5, 2, "engine-0.1:7")


async def test_an_update_is_bracketed_and_the_bracket_is_closed_after_a_refusal() -> None:
    """Fails without the `finally` in `update_weights`: the server would refuse every later update."""
    async with serving() as server, SGLangClient() as client:
        await client.update_weights(server.url, "pkg.load", ["p0", "p1"], 5)
        assert server.called() == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
        body = server.bodies[1][1]
        assert body["serialized_named_tensors"] == ["p0", "p1"] and body["load_format"] == "pkg.load"
        assert body["flush_cache"] is False and body["selector"] == "target"
        server.status = {"/update_weights_from_tensor": 400}
        with pytest.raises(EngineRejected):
            await client.update_weights(server.url, "pkg.load", ["p0"], 5)
        assert server.called()[-1] == "/end_weight_update"


async def test_a_server_without_brackets_is_asked_once() -> None:
    async with serving() as server, SGLangClient() as client:
        server.status = {"/begin_weight_update": 404}
        for _ in range(2):
            await client.update_weights(server.url, "pkg.load", ["p0"], 5)
        update = "/update_weights_from_tensor"
        assert server.called() == ["/begin_weight_update", update, update]
        assert "selector" not in server.bodies[-1][1]
        client.forget(server.url)
        await client.update_weights(server.url, "pkg.load", ["p0"], 5)
        assert server.called()[-2] == "/begin_weight_update"


async def test_a_call_without_an_answer_ends_at_its_deadline() -> None:
    async with serving() as server, SGLangClient() as client:
        server.hold.clear()
        with pytest.raises(EngineUnreachable, match="in time"):
            await client.check_health(server.url, 0.1)
