"""How groups end: filtered, dropped, failed, or moved to another engine; each is counted and replaced."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from controllers.errors import EngineRejected
from executors.errors import NoUsableGroups, RolloutFailed
from executors.trajectory import Prompt
from tests.executors.world import Prompts, World, assert_bit_for_bit, make_prompt
from tests.fakes.sampling_client import Refuse
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_filtered_group_is_replaced(tmp_path: Path) -> None:
    """O14. Fails when `_end` does not give the group's place in the admission back: a silent hang."""
    async with World(tmp_path, groups_per_step=8, max_staleness=0) as world:
        world.scorer.answer = lambda prompt: None if prompt.index == 3 else 1.0
        batch = await anext(world.executor.batches(Prompts(None)))
        assert len(batch.groups) == 8
        assert 3 not in {group.prompt.index for group in batch.groups}
        assert world.executor.account.reasons["filtered"] == {"no_reward": 1}
        world.assert_accounted()


@virtual_time
async def test_filter_with_no_prompt_left_ends_the_stream(tmp_path: Path) -> None:
    """O14's other half: 8 submitted, 1 rejected, and nothing to replace it with."""
    async with World(tmp_path, groups_per_step=8) as world:
        world.scorer.answer = lambda prompt: None if prompt.index == 3 else 1.0
        assert [batch async for batch in world.executor.batches(Prompts(8))] == []
        account = world.executor.account
        assert (account.dispatched, account.buffered, account.filtered, account.lost) == (8, 7, 1, 0)


@virtual_time
async def test_zero_variance_filter(tmp_path: Path) -> None:
    async with World(tmp_path, filter_zero_variance=True) as world:
        turns = iter([1.0, 1.0, 0.0, 1.0, None, 1.0, 0.5, 0.0])
        world.scorer.answer = lambda prompt: next(turns)
        groups = [group async for group in world.executor.stream(Prompts(4))]
        assert len(groups) == 2
        assert world.executor.account.reasons["filtered"] == {"zero_variance": 2}


@virtual_time
async def test_engine_death_moves_its_samples(tmp_path: Path) -> None:
    """O16. 2 engines, 8 streams; one dies with tokens in half of them."""
    async with World(tmp_path, groups_per_step=8, group_size=1) as world:
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(4.5)
                world.kill("engine-0")

            tasks.start_soon(kill)
            batch = await anext(world.executor.batches(Prompts(8)))
        assert sorted(group.prompt.index for group in batch.groups) == list(range(8))
        moved = 0
        for group in batch.groups:
            (trajectory,) = group.trajectories
            assert_bit_for_bit(trajectory, 8)
            moved += len(trajectory.spans) == 2
        assert moved == 4
        assert world.leases.held == 0 and world.executor._permits.taken == 0
        assert anyio.current_time() < 4.5 + 2 + 4


@virtual_time
async def test_engine_death_unseen_by_the_controller(tmp_path: Path) -> None:
    """The dead engine still looks least loaded; without `exclude` it would swallow every retry."""
    async with World(tmp_path, groups_per_step=8, group_size=1, max_retries=2) as world:
        stream = world.executor.batches(Prompts(8))
        await anyio.sleep(4.5)
        world.server("engine-0").die()
        batch = await anext(stream)
        assert len(batch.groups) == 8
        assert world.executor.account.failed == 0


@virtual_time
async def test_too_long_prompt_is_a_counted_drop(tmp_path: Path) -> None:
    async with World(tmp_path, max_prompt_tokens=4) as world:

        class Mixed(Prompts):
            def next(self) -> Prompt | None:
                prompt = super().next()
                return None if prompt is None else make_prompt(prompt.index, (4, 5, 64, 3)[prompt.index])

        groups = [group async for group in world.executor.stream(Mixed(4))]
        assert sorted(group.prompt.index for group in groups) == [0, 3]
        assert world.executor.account.reasons["dropped"] == {"prompt_too_long": 2}
        assert all(len(request.input_ids) <= 4 for request in world.client.requests)


@virtual_time
async def test_prompt_the_engine_finds_too_long_is_a_counted_drop(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1) as world:
        error = EngineRejected("the input is longer than the model's context length", status=400)
        world.server("engine-0").faults.append(Refuse(error))
        groups = [group async for group in world.executor.stream(Prompts(3))]
        assert len(groups) == 2
        assert world.executor.account.reasons["dropped"] == {"prompt_too_long": 1}
        assert not world.server("engine-0").live


@virtual_time
async def test_failed_sample_fails_its_group_and_frees_its_siblings(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1, group_size=4) as world:
        world.server("engine-0").faults.append(Refuse(EngineRejected("bad", status=422)))
        groups = [group async for group in world.executor.stream(Prompts(2))]
        assert [group.prompt.index for group in groups] == [1]
        assert world.executor.account.reasons["failed"] == {"rejected_422": 1}
        assert world.executor._permits.taken == 0
        assert world.scorer.calls == 4  # none of the failed group's siblings was scored


@virtual_time
async def test_errors_leak_no_permit(tmp_path: Path) -> None:
    """NeMo-RL#3219. As many failures as permits, twice. Fails without `finally` around `runner.run`."""
    async with World(tmp_path, engines=1, concurrency=4, group_size=2, max_staleness=9) as world:
        world.server("engine-0").faults.extend([Refuse(EngineRejected("bad", status=422))] * 8)
        groups = [group async for group in world.executor.stream(Prompts(12))]
        account = world.executor.account
        assert account.failed >= 4 and len(groups) == 12 - account.failed
        assert world.executor._permits.taken == 0


@virtual_time
async def test_hopeless_prompts_end_the_run_with_a_cause(tmp_path: Path) -> None:
    """Fails without `max_barren_groups`: the reader would wait for ever while every group is filtered."""
    async with World(tmp_path, max_barren_groups=50, token_s=0.0) as world:
        world.scorer.answer = lambda prompt: None
        with pytest.raises(RolloutFailed) as failed:
            await anext(world.executor.batches(Prompts(None)))
        assert isinstance(failed.value.__cause__, NoUsableGroups)
        assert "no_reward" in str(failed.value)
        assert str(failed.value.__cause__).endswith("; so far 51 filtered(no_reward)")


@virtual_time
async def test_training_twice_is_refused_and_counted(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        executor = world.executor
        batch = await anext(executor.batches(Prompts(2)))
        executor.mark_trained(batch)
        executor.mark_trained(batch)
        assert (executor.account.trained, executor.account.duplicated, executor.account.lost) == (2, 2, 0)
