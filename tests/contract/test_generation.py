"""The contract of executors.sampling_client.SamplingClient, over a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controllers.errors import EngineRejected
from controllers.ports import PauseMode
from executors.sampling_client import GenerateRequest, LabelSpan, SamplingParams, TokenChunk
from tests.contract.subjects import PROMPT, ServerSubject, shared_server
from tests.support.embedded_server import CONTEXT_LENGTH, LABEL, VOCAB_SIZE, RunningServer

pytestmark = pytest.mark.real


async def _generate(it: ServerSubject, sampling: SamplingParams, request_id: str = "r" * 16) -> list[TokenChunk]:
    request = GenerateRequest(request_id, PROMPT, sampling, LABEL)
    return [chunk async for chunk in it.client.generate(it.engine.url, request)]


def _tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_tokens_stream_with_their_logprobs_and_one_span(server: RunningServer, tmp_path: Path) -> None:
    async with shared_server(server, tmp_path / "note") as it:
        chunks = await _generate(it, SamplingParams(20))
    assert len(chunks) > 1 and len(_tokens(chunks)) == 20
    assert all(0 <= token < VOCAB_SIZE for token in _tokens(chunks))
    assert all(value < 0 for chunk in chunks for value in chunk.logprobs)
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["length"]
    assert chunks[-1].spans == (LabelSpan(LABEL, 0, 20),)


async def test_a_stop_token_ends_and_is_kept(server: RunningServer, tmp_path: Path) -> None:
    async with shared_server(server, tmp_path / "note") as it:
        greedy = _tokens(await _generate(it, SamplingParams(8, temperature=0.0)))
        stop = greedy[4]
        chunks = await _generate(it, SamplingParams(8, temperature=0.0, stop_token_ids=(stop,)))
    assert _tokens(chunks) == greedy[: greedy.index(stop) + 1]
    assert chunks[-1].finish == "stop"


async def test_a_prompt_as_long_as_the_context_is_refused(server: RunningServer, tmp_path: Path) -> None:
    async with shared_server(server, tmp_path / "note") as it:
        request = GenerateRequest("r" * 16, PROMPT * (CONTEXT_LENGTH // len(PROMPT)), SamplingParams(1), LABEL)
        with pytest.raises(EngineRejected) as refused:
            await anext(it.client.generate(it.engine.url, request))
    assert refused.value.status == 400


async def test_an_aborted_request_keeps_its_tokens_and_its_spans(server: RunningServer, tmp_path: Path) -> None:
    async with shared_server(server, tmp_path / "note") as it:
        await it.begin("a" * 16)
        generation = it.requests["a" * 16]
        await generation.more(5)
        await it.engine.abort("a" * 16)
        await asyncio.wait_for(generation.task, 10)
    assert generation.chunks[-1].finish == "abort"
    assert generation.chunks[-1].spans == (LabelSpan(LABEL, 0, generation.tokens),)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_spans_tell_exactly_which_tokens_came_before_the_update(
    server: RunningServer, tmp_path: Path, mode: PauseMode
) -> None:
    """Each token carries the label under which it was sampled: the count at the pause is the border."""
    async with shared_server(server, tmp_path / "note") as it:
        await it.begin("a" * 16)
        generation = it.requests["a" * 16]
        await generation.more(3)
        await it.engine.pause(mode)
        before = (await it.engine.health(5)).tokens_generated
        await it.engine.set_weight_version("engine-0.1:1")
        assert (await it.engine.health(5)).tokens_generated == before
        await it.engine.resume()
        await generation.more(5)
        await it.engine.abort("a" * 16)
        await asyncio.wait_for(generation.task, 10)
    old, new = generation.chunks[-1].spans
    assert (old.label, new.label) == (LABEL, "engine-0.1:1")
    assert (old.start, old.end) == (0, new.start) and new.end == generation.tokens
    assert old.end >= 4 and new.end - new.start >= 2


async def test_a_stream_that_is_left_does_not_stop_the_others(server: RunningServer, tmp_path: Path) -> None:
    async with shared_server(server, tmp_path / "note") as it:
        await it.begin("b" * 16)
        request = GenerateRequest("c" * 16, PROMPT, SamplingParams(100), LABEL)
        async for _ in it.client.generate(it.engine.url, request):
            break
        await it.engine.abort("c" * 16)
        assert await it.live() == {"b" * 16}
