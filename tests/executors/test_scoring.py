"""Rewards as the executor takes them: a finite number or none, and nothing held while a scorer works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from executors.trajectory import Prompt
from tests.executors.world import Prompts, Scorer, Slow, World
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_a_sample_without_reward_stays_none(tmp_path: Path) -> None:
    """O05's half of the executor: an abstaining verifier is not a score of 0."""
    async with World(tmp_path, group_size=4) as world:
        answers = iter([1.0, None, float("nan"), ValueError("verifier bug")])
        world.scorer.answer = lambda prompt: next(answers)
        (group,) = [group async for group in world.executor.stream(Prompts(1))]
        assert [trajectory.reward for trajectory in group.trajectories] == [1.0, None, None, None]
        statistics = world.executor.statistics()
        assert (statistics.abstained, statistics.reward_errors) == (3, 2)


@virtual_time
async def test_samples_wait_for_their_turn_at_a_slow_scorer(tmp_path: Path) -> None:
    """Fails with a deadline around the scorer's call, which would count the wait for a free worker."""

    class OneAtATime(Scorer):
        worker = anyio.Lock()

        async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float | None:
            async with self.worker:
                await anyio.sleep(100)
            return await super().score(prompt, response_ids)

    async with World(tmp_path, group_size=16, scorer=OneAtATime()) as world:
        (group,) = [group async for group in world.executor.stream(Prompts(1))]
        assert all(trajectory.reward is not None for trajectory in group.trajectories)
        assert anyio.current_time() == 8 + 16 * 100
        assert world.executor.statistics().abstained == 0


@virtual_time
async def test_slow_scorer_holds_no_engine_slot_and_no_permit(tmp_path: Path) -> None:
    """Fails when `on_generated` is called after scoring."""
    async with World(tmp_path, concurrency=2, max_staleness=3) as world:
        world.scorer.answer = lambda prompt: Slow(1000) if prompt.index == 0 else 1.0
        stream = world.executor.stream(Prompts(2))
        assert (await anext(stream)).prompt.index == 1
        assert anyio.current_time() == 16
        assert world.leases.held == 0
