"""The engine over HTTP, in a process of its own: generation, streaming, refusals, aborts, pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.miles.engines.embedded.engine_process import EngineCalls, EngineProcess, body, joined
from tests.miles.engines.embedded.reference import Reference

pytestmark = pytest.mark.real

_PROMPT = [65, 66, 67, 68, 69]


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    return Reference(model_folder)


@pytest.fixture(autouse=True)
def _engine_is_left_clean(engine: EngineProcess) -> Iterator[None]:
    yield
    assert engine.process.poll() is None, engine.errors()


async def _until_tokens(stream: Any, count: int) -> list[dict[str, Any]]:
    """Chunks of a stream until it gave `count` tokens."""
    chunks: list[dict[str, Any]] = []
    while len(joined(chunks)) < count:
        chunks.append(await anext(stream))
    return chunks


async def test_stream_equals_transformers(engine: EngineProcess, reference: Reference) -> None:
    expected = reference.greedy(_PROMPT, 30)
    async with EngineCalls(engine) as calls:
        chunks = [chunk async for chunk in calls.stream(input_ids=_PROMPT, max_new_tokens=30, rid="greedy-1")]
    assert joined(chunks) == expected
    entries = [entry for chunk in chunks for entry in chunk["meta_info"]["output_token_logprobs"]]
    assert [token for _, token, _ in entries] == expected
    assert [logprob for logprob, _, _ in entries] == pytest.approx(reference.logprobs(_PROMPT, expected), abs=1e-4)
    meta = chunks[-1]["meta_info"]
    assert (meta["id"], meta["finish_reason"]["type"]) == ("greedy-1", "length")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 30)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 30}]
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_logprobs_of_sampled_tokens(engine: EngineProcess, reference: Reference, temperature: float) -> None:
    async with EngineCalls(engine) as calls:
        answer = await calls.generate(input_ids=_PROMPT, max_new_tokens=20, temperature=temperature, top_p=0.9)
    logprobs, tokens, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
    assert list(tokens) == answer["output_ids"]
    assert list(logprobs) == pytest.approx(reference.logprobs(_PROMPT, tokens, temperature), abs=1e-4)


async def test_end_of_sequence_stops_and_is_kept(engine: EngineProcess, reference: Reference) -> None:
    stop = reference.greedy(_PROMPT, 6)[5]
    async with EngineCalls(engine) as calls:
        answer = await calls.generate(input_ids=_PROMPT, max_new_tokens=50, ignore_eos=False, stop_token_ids=[stop])
    assert answer["output_ids"][-1] == stop
    assert answer["output_ids"].count(stop) == 1
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_the_context_ends_a_request(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        answer = await calls.generate(input_ids=[65] * 500, max_new_tokens=100)
    assert len(answer["output_ids"]) == 12
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_refusals(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        for request, message in (
            ({"input_ids": [65] * 512}, "512 tokens"),
            ({"text": "hello"}, "no tokenizer"),
            (body([65], stop=["\n"]), "stop="),
            ([], "JSON object"),
        ):
            answer = await calls.post("/generate", request, status=400)
            assert message in answer["error"]["message"]
        await calls.post("/pause_generation", {"mode": "slowly"}, status=400)
        await calls.post("/abort_request", {}, status=400)
        assert (await calls.get("/server_info"))["running"] == 0


async def test_a_live_request_id_is_refused(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=500, rid="twice")
        await anext(stream)
        answer = await calls.post("/generate", body(_PROMPT, rid="twice"), status=400)
        assert "'twice' is the id of a live request" in answer["error"]["message"]
        await calls.post("/abort_request", {"rid": "twice"})
        assert [chunk async for chunk in stream][-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await calls.generate(input_ids=_PROMPT, rid="twice"))["output_ids"]


async def test_abort_is_by_exact_id(engine: EngineProcess, reference: Reference) -> None:
    """SGLang would abort g10 with g1."""
    async with EngineCalls(engine) as calls:
        first = calls.stream(input_ids=_PROMPT, max_new_tokens=500, rid="g1")
        tenth = asyncio.create_task(calls.generate(input_ids=_PROMPT, max_new_tokens=100, rid="g10"))
        begun = await _until_tokens(first, 2)
        await calls.post("/abort_request", {"rid": "g1"})
        chunks = begun + [chunk async for chunk in first]
        answer = await tenth
    meta = chunks[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    count = len(joined(chunks))
    assert 2 <= count < 500
    assert meta["completion_tokens"] == meta["weight_versions"][-1]["end"] == count
    assert joined(chunks) == reference.greedy(_PROMPT, count)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 100


async def test_a_client_that_leaves_aborts_its_request(engine: EngineProcess) -> None:
    """Streaming and queued. Fails without `handler_cancellation`, or without the abort in the handler's `finally`."""
    async with EngineCalls(engine) as calls:
        before = (await calls.get("/server_info"))["tokens_generated"]
        for _ in range(3):
            stream = calls.stream(input_ids=_PROMPT, max_new_tokens=500)
            await anext(stream)
            await stream.aclose()
        info = await calls.until_idle()
        assert info["tokens_generated"] - before < 3 * 500
        await calls.post("/pause_generation", {"mode": "in_place"})
        waiting = asyncio.create_task(calls.generate(input_ids=_PROMPT, max_new_tokens=500))
        while not (await calls.get("/server_info"))["queued"]:
            pass
        waiting.cancel()
        await calls.until_idle()
        await calls.post("/continue_generation")


async def test_thirty_two_streams_at_once(engine: EngineProcess, reference: Reference) -> None:
    prompts = [[65 + i, 66, 67 + i % 5] for i in range(32)]

    async def collect(calls: EngineCalls, prompt: list[int]) -> list[int]:
        return joined([chunk async for chunk in calls.stream(input_ids=prompt, max_new_tokens=25)])

    async with EngineCalls(engine) as calls:
        answers = await asyncio.gather(*(collect(calls, prompt) for prompt in prompts))
    for prompt, answer in list(zip(prompts, answers, strict=True))[::8]:
        assert answer == reference.greedy(prompt, 25)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_and_continue(engine: EngineProcess, reference: Reference, mode: str) -> None:
    async with EngineCalls(engine) as calls:
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=200)
        chunks = await _until_tokens(stream, 3)
        await calls.post("/pause_generation", {"mode": mode})
        paused = await calls.get("/server_info")
        assert (paused["running"], paused["queued"]) == ((1, 0) if mode == "in_place" else (0, 1))
        await calls.post("/flush_cache", status=400 if mode == "in_place" else 200)
        late = asyncio.create_task(calls.generate(input_ids=_PROMPT, max_new_tokens=5))
        while (await calls.get("/server_info"))["queued"] == paused["queued"]:
            pass
        assert (await calls.get("/server_info"))["tokens_generated"] == paused["tokens_generated"]
        await calls.post("/continue_generation", {"torch_empty_cache": False})
        chunks += [chunk async for chunk in stream]
        assert joined(chunks) == reference.greedy(_PROMPT, 200)
        assert (await late)["output_ids"] == joined(chunks)[:5]


async def test_pause_abort(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        stream = calls.stream(input_ids=_PROMPT, max_new_tokens=500)
        chunks = await _until_tokens(stream, 3)
        await calls.post("/pause_generation", {"mode": "abort"})
        chunks += [chunk async for chunk in stream]
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        await calls.post("/continue_generation")
        assert len((await calls.generate(input_ids=_PROMPT))["output_ids"]) == 8


async def test_health(engine: EngineProcess) -> None:
    async with EngineCalls(engine) as calls:
        info = await calls.get("/server_info")
        assert info["tensor_encoding"] == "safetensors"
        assert info["pid"] == engine.process.pid
        assert (info["tp_size"], info["context_length"], info["max_running_requests"]) == (1, 512, 64)
        before = info["tokens_generated"]
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/health_generate") as response:
            assert response.status == 200
        assert (await calls.get("/health"))["tokens_generated"] == before + 1
        assert (await calls.get("/get_load"))[0]["num_reqs"] == 0


async def test_an_idle_engine_takes_no_time(engine: EngineProcess) -> None:
    """Fails when the scheduler polls: an idle engine must leave its core to a loader's pull agent."""
    process = psutil.Process(engine.process.pid)
    async with EngineCalls(engine) as calls:
        await calls.until_idle()
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(0.5)  # the measured interval
    assert sum(process.cpu_times()[:2]) - before < 0.1 * (time.monotonic() - began)
    assert process.children() == []
