"""Chunks: disjoint, paced, whole."""

from __future__ import annotations

import asyncio
from typing import Any

from miles.engines.embedded.output import StreamPacer, TokenOutput
from miles.engines.embedded.request import Span, Update
from tests.support.virtual_time import virtual_time


def _output(pacer: StreamPacer | None) -> TokenOutput:
    return TokenOutput("r", 3, return_logprob=True, pacer=pacer)


def _push(output: TokenOutput, token: int | None, finish: str | None = None) -> None:
    spans = (Span("v1", 0, 2),) if finish else ()
    output.push(Update(output, token, -0.5, "v1", {"type": finish} if finish else None, spans, 2))


async def test_without_a_delay_every_step_is_a_chunk() -> None:
    output = _output(StreamPacer(0.0))
    _push(output, 7)
    first = await output.next_chunk()
    assert not output.finished
    _push(output, 8, "length")
    last = await output.next_chunk()
    assert output.finished
    assert (first["output_ids"], last["output_ids"]) == ([7], [8])
    assert first["meta_info"]["output_token_logprobs"] == [(-0.5, 7, None)]
    assert "weight_versions" not in first["meta_info"]
    assert last["meta_info"] == {
        "id": "r",
        "finish_reason": {"type": "length"},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 2,
        "weight_version": "v1",
        "output_token_logprobs": [(-0.5, 8, None)],
        "weight_versions": [{"version": "v1", "start": 0, "end": 2}],
    }


@virtual_time
async def test_tokens_gather_for_the_delay() -> None:
    loop = asyncio.get_running_loop()
    output = _output(StreamPacer(0.005))
    for moment, token in ((0.0, 1), (0.002, 2), (0.004, 3), (0.006, 4)):
        loop.call_later(moment, _push, output, token)
    chunks: list[tuple[float, Any]] = []
    for _ in range(2):
        chunk = await output.next_chunk()
        chunks.append((round(loop.time(), 6), chunk["output_ids"]))
    assert chunks == [(0.005, [1, 2, 3]), (0.011, [4])]


@virtual_time
async def test_the_last_tokens_do_not_wait() -> None:
    output = _output(StreamPacer(0.5))
    _push(output, 1)
    _push(output, 2, "stop")
    assert (await output.next_chunk())["output_ids"] == [1, 2]
    assert asyncio.get_running_loop().time() == 0


async def test_without_a_pacer_all_comes_at_the_end() -> None:
    output = _output(None)
    chunk = asyncio.ensure_future(output.next_chunk())
    for token in (1, 2):
        await asyncio.sleep(0)
        _push(output, token)
    await asyncio.sleep(0)
    assert not chunk.done()
    _push(output, None, "abort")
    assert (await chunk)["output_ids"] == [1, 2]
