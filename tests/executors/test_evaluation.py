"""`sample`: evaluation beside training."""

from __future__ import annotations

from pathlib import Path

from executors.sampling_client import SamplingParams
from executors.trajectory import Prompt
from tests.executors.world import Prompts, World, make_prompt
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_evaluation_of_any_number_of_prompts(tmp_path: Path) -> None:
    """O17. Train batch 4, five prompts; order kept, each scored once, training goes on."""
    async with World(tmp_path, groups_per_step=4, concurrency=2, token_s=0.1) as world:
        executor = world.executor
        stream = executor.batches(Prompts(None))
        executor.mark_trained(await anext(stream))
        scored: list[int] = []

        def answer(prompt: Prompt) -> float:
            if prompt.index >= 100:
                scored.append(prompt.index)
            return float(prompt.index)

        world.scorer.answer = answer
        prompts = [make_prompt(100 + index, length=3 + index) for index in range(5)]
        results = await executor.sample(prompts, SamplingParams(max_new_tokens=4, temperature=0.0))
        assert [len(result.prompt_ids) for result in results] == [3, 4, 5, 6, 7]
        assert [result.reward for result in results] == [100, 101, 102, 103, 104]
        assert sorted(scored) == [100, 101, 102, 103, 104]
        names = [request.request_id[:11] for request in world.client.requests if request.request_id[0] == "e"]
        assert sorted(names) == [f"e{number:010d}" for number in range(5)]
        world.assert_accounted()
        world.update(2)
        executor.mark_trained(await anext(stream))
        assert executor.account.trained == 8
        assert await executor.sample([], SamplingParams(max_new_tokens=4)) == []


@virtual_time
async def test_evaluation_of_a_prompt_that_is_too_long_abstains(tmp_path: Path) -> None:
    async with World(tmp_path, max_context=16) as world:
        results = await world.executor.sample([make_prompt(0, 16), make_prompt(1, 4)], SamplingParams(max_new_tokens=4))
        assert [(len(result.response_ids), result.reward) for result in results] == [(0, None), (4, 1.0)]
