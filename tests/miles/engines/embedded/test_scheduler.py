"""Continuous batching with a real model, in this process: no request may notice the others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from miles.engines.embedded.model import Decoder
from miles.engines.embedded.request import RequestRefused
from miles.engines.embedded.sampler import Sampling
from tests.miles.engines.embedded.in_process import InProcess, read_decoder


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Decoder:
    return read_decoder(model_folder)


def _prompts(count: int, longest: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, 250) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


async def test_together_equals_one_by_one(model: Decoder) -> None:
    """24 requests over 5 slots join and leave between steps; prompts up to 90 tokens, in chunks of 32."""
    prompts = _prompts(24, 90)
    counts = [1 + (7 * i) % 40 for i in range(24)]
    async with InProcess(model, slots=1, prefix_tokens=0, chunk=4096) as alone:
        expected = [await alone.generate(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    async with InProcess(model, slots=5, chunk=32) as together:
        outputs = [together.submit(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
        for output in outputs:
            await output.ended.wait()
        assert together.scheduler.running == together.scheduler.queued == together.scheduler.held_tokens == 0
    for output, reference, count in zip(outputs, expected, counts, strict=True):
        assert output.tokens == reference.tokens
        assert len(output.tokens) == count
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        assert output.finish == "length"


async def test_a_group_of_one_prompt_computes_it_once(model: Decoder) -> None:
    """Fails when requests with a prompt that is being computed do not wait for it."""
    prompt = list(range(10, 40))
    async with InProcess(model, slots=16) as engine:
        group = [engine.submit(prompt, 4, salt="v1") for _ in range(16)]
        for output in group:
            await output.ended.wait()
    assert sorted(output.cached for output in group) == [0] + [29] * 15
    assert len({tuple(output.tokens) for output in group}) == 1


async def test_prefixes_are_shared_in_part_and_across_turns(model: Decoder) -> None:
    async with InProcess(model) as engine:
        first = await engine.generate(list(range(10, 30)), 20)
        turn = [*range(10, 30), *first.tokens, 5, 6]
        second = await engine.generate(turn, 5)
        branch = await engine.generate([*range(10, 20), 9, 9, 9], 5)
    assert second.cached == 39  # all but the last sampled token, whose KV was never computed
    assert branch.cached == 10
    async with InProcess(model, prefix_tokens=0) as engine:
        assert (await engine.generate(turn, 5)).tokens == second.tokens
        assert (await engine.generate([*range(10, 20), 9, 9, 9], 5)).tokens == branch.tokens


async def test_salts_keep_prefixes_apart(model: Decoder) -> None:
    prompt = list(range(10, 30))
    async with InProcess(model) as engine:
        await engine.generate(prompt, 2, salt="a:1")
        assert (await engine.generate(prompt, 2, salt="a:1")).cached == 19
        assert (await engine.generate(prompt, 2, salt="a:2")).cached == 0


async def test_stop_token_is_kept(model: Decoder) -> None:
    async with InProcess(model) as engine:
        free = await engine.generate([5, 6, 7], 10)
        stop = free.tokens[4]
        output = engine.submit([5, 6, 7], 10, stop_ids=[stop])
        await output.ended.wait()
    assert output.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert output.last is not None and output.last.finish == {"type": "stop", "matched": stop}


async def test_abort_is_by_exact_id_in_every_state(model: Decoder) -> None:
    """Running, in prefill and queued. Fails when ids are matched by prefix, as SGLang does."""
    async with InProcess(model, slots=2, chunk=8) as engine:
        running = engine.submit([5, 6], 400, rid="g1")
        sibling = engine.submit([5, 6, 7], 60, rid="g10")
        queued = engine.submit([5, 6], 400, rid="q1")
        await running.until(3)
        for rid in ("g1", "q1", "unknown", "g"):
            engine.scheduler.abort(rid)
        await running.ended.wait()
        await queued.ended.wait()
        await sibling.ended.wait()
        assert (running.finish, queued.finish, sibling.finish) == ("abort", "abort", "length")
        assert len(running.tokens) >= 3
        assert queued.tokens == []
        assert len(sibling.tokens) == 60
        # Forty chunks long: still in prefill when the abort comes.
        prefilling = engine.submit(range(3, 250), 5, rid="p1")
        engine.scheduler.abort("p1")
        await prefilling.ended.wait()
        assert (prefilling.finish, prefilling.tokens) == ("abort", [])
        again = await engine.generate([5, 6], 3)
    assert again.tokens == running.tokens[:3]


async def test_pause_in_place_keeps_kv_and_labels_exactly(model: Decoder) -> None:
    async with InProcess(model) as engine:
        whole = await engine.generate([5, 6, 7], 60)
        output = engine.submit([5, 6, 7], 60)
        await output.until(4)
        await engine.scheduler.pause("in_place")
        sampled = engine.scheduler.tokens_generated - 60
        assert engine.scheduler.running == 1
        with pytest.raises(RequestRefused, match="1 requests hold KV"):
            await engine.scheduler.flush_cache()
        await engine.scheduler.set_weight_version("v2")
        late = engine.submit([8, 9], 3)
        assert engine.scheduler.tokens_generated - 60 == sampled
        await engine.scheduler.resume()
        await output.ended.wait()
        await late.ended.wait()
    assert output.tokens == whole.tokens
    assert output.spans == [("v1", 0, sampled), ("v2", sampled, 60)]
    assert late.spans == [("v2", 0, 3)]


async def test_retract_recomputes_and_goes_on(model: Decoder) -> None:
    """Fails when retract keeps KV: what is asserted is that rows and prefixes are gone and nothing else changed."""
    prompts = _prompts(6, 30)
    async with InProcess(model, slots=4, chunk=16) as engine:
        expected = [await engine.generate(prompt, 50) for prompt in prompts]
        outputs = [engine.submit(prompt, 50, salt="second") for prompt in prompts]
        await outputs[0].until(10)
        await engine.scheduler.pause("retract")
        assert engine.scheduler.running == engine.scheduler.held_tokens == 0
        assert engine.scheduler.queued == 6
        await engine.scheduler.flush_cache()
        await engine.scheduler.set_weight_version("v2")
        await engine.scheduler.resume()
        for output, reference in zip(outputs, expected, strict=True):
            await output.ended.wait()
            assert output.tokens == reference.tokens
            assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
        (first, _, cut), (second, start, end) = outputs[0].spans
        assert (first, second, end) == ("v1", "v2", 50)
        assert cut == start >= 10


async def test_retract_drops_kv_of_old_weights(model_folder: Path) -> None:
    """After zeroed value projections only recomputed KV gives the new model's continuation."""
    model = read_decoder(model_folder)
    async with InProcess(model) as engine:
        output = engine.submit(range(10, 40), 40)
        await output.until(5)
        await engine.scheduler.pause("retract")
        with torch.no_grad():
            model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")[-64:].zero_()
        kept = list(output.tokens)
        await engine.scheduler.resume()
        await output.ended.wait()
        kept = output.tokens[: max(len(kept), 5)]
        await engine.scheduler.flush_cache()
        fresh = await engine.generate([*range(10, 40), *kept], 40 - len(kept))
    assert output.tokens == kept + fresh.tokens


async def test_pause_abort_ends_all_and_new_requests_queue(model: Decoder) -> None:
    async with InProcess(model, slots=1) as engine:
        running, queued = engine.submit([5, 6], 400), engine.submit([7, 8], 400)
        await running.until(2)
        await engine.scheduler.pause("abort")
        await running.ended.wait()
        await queued.ended.wait()
        assert (running.finish, queued.finish) == ("abort", "abort")
        late = engine.submit([5, 6], 3)
        await engine.scheduler.pause("in_place")
        assert engine.scheduler.queued == 1
        assert late.tokens == []
        await engine.scheduler.resume()
        await late.ended.wait()
        assert late.tokens[:2] == running.tokens[:2]


async def test_the_token_budget_holds_requests_back(model: Decoder) -> None:
    """Fails when admission does not count reserved tokens: the second request would run beside the first."""
    async with InProcess(model, max_total_tokens=100) as engine:
        first, second = engine.submit([5, 6], 88), engine.submit([5, 6], 20)
        await first.until(40)
        assert engine.scheduler.queued == 1
        assert second.tokens == []
        await first.ended.wait()
        await second.ended.wait()
    assert second.tokens == first.tokens[:20]


async def test_requests_of_one_round_share_the_token_budget(model: Decoder) -> None:
    """Fails when `_admit` does not count its candidates: both prompts, unlike and new, would go into one prefill."""
    async with InProcess(model, max_total_tokens=100) as engine:
        await engine.scheduler.pause("in_place")
        first, second = engine.submit([5, 6], 60), engine.submit([7, 8], 60)
        await engine.scheduler.resume()
        await first.until(20)
        assert engine.scheduler.held_tokens <= 100
        assert (engine.scheduler.queued, second.tokens) == (1, [])
        await first.ended.wait()
        await second.ended.wait()


async def test_sampled_logprobs_are_of_the_scaled_distribution(model: Decoder) -> None:
    async with InProcess(model) as engine:
        hot = engine.submit([5, 6, 7], 20, sampling=Sampling(1.3))
        cold = engine.submit([5, 6, 7], 20, sampling=Sampling(0.0))
        await hot.ended.wait()
        await cold.ended.wait()
        assert hot.tokens != cold.tokens
        assert max(hot.logprobs) < 0


async def test_an_idle_scheduler_waits(model: Decoder) -> None:
    """Fails when the thread polls: it must be inside Condition.wait, and take no time of this process."""
    import sys
    import time

    async with InProcess(model) as engine:
        await engine.generate([5, 6], 3)
        thread = engine.scheduler._thread
        await engine.scheduler.call(lambda: None)
        before = time.thread_time_ns(), time.process_time_ns()
        await asyncio.sleep(0.2)  # the measured interval
        own, process = time.thread_time_ns() - before[0], time.process_time_ns() - before[1]
        assert (process - own) / 1e9 < 0.02
        assert thread.ident is not None
        assert sys._current_frames()[thread.ident].f_code.co_name == "wait"
