"""Admission and staleness of a running executor. The gate's arithmetic: test_staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.errors import WaitTimeout
from executors.errors import NegativeStaleness
from executors.trajectory import Batch
from tests.executors.world import Prompts, World
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_admission_bounds_what_is_generated_ahead(tmp_path: Path) -> None:
    """Fails without the gate in `_dispatch`: everything would be dispatched at once."""
    async with World(tmp_path, groups_per_step=3, max_staleness=1, token_s=0.01) as world:
        executor = world.executor
        stream = executor.batches(Prompts(None))
        for step in range(1, 6):
            batch = await anext(stream)
            await anyio.sleep(10)
            account = executor.account
            assert account.trained + account.buffered + account.in_flight == (step - 1 + 1 + 1) * 3
            executor.mark_trained(batch)
            world.update(step + 1)


@virtual_time
async def test_admission_after_a_resume_counts_the_steps_done(tmp_path: Path) -> None:
    """Fails when `_attach` does not start the lineage: 57 steps' worth of groups would go out at once."""
    async with World(tmp_path, max_staleness=1) as world:
        world.update(58)
        stream = world.executor.batches(Prompts(None), first_step=58)
        await anyio.sleep(50)
        assert world.executor.account.dispatched == 2 * 2
        batch = await anext(stream)
        assert (batch.step, batch.staleness) == (58, (0, 0))


@virtual_time
async def test_nothing_goes_out_before_weights_are_published(tmp_path: Path) -> None:
    """The prompts may be handed over before a long warm-up, while no engine serves yet."""
    async with World(tmp_path, published=False) as world:
        world.executor.batches(Prompts(None))
        await anyio.sleep(1000)
        assert world.executor.account.dispatched == 0
        world.executor.on_published(0)
        await anyio.sleep(1)
        assert world.executor.account.dispatched == 4


@virtual_time
async def test_a_reader_needs_no_publication(tmp_path: Path) -> None:
    """Engines that somebody else keeps serve some weights already."""
    async with World(tmp_path, published=False) as world:
        assert (await anext(world.executor.stream(Prompts(1)))).prompt.index == 0


@virtual_time
@pytest.mark.parametrize("kind", ["stream", "batches"])
async def test_without_a_trainer_generation_keeps_pace_with_the_reader(tmp_path: Path, kind: str) -> None:
    """Fails when `_take_group` or `_take_batch` hands out nothing to the gate: the reader would wait for weights."""
    async with World(tmp_path, max_staleness=None, groups_per_step=2) as world:
        taken = 0
        async for item in getattr(world.executor, kind)(Prompts(40)):
            taken += len(item.groups) if isinstance(item, Batch) else 1
            await anyio.sleep(50)
            assert world.executor.account.dispatched == min(taken + 2 * 2, 40)
        assert taken == 40


@virtual_time
async def test_staleness_zero_is_on_policy(tmp_path: Path) -> None:
    async with World(tmp_path, max_staleness=0) as world:
        stream = world.executor.batches(Prompts(None))
        for step in range(1, 6):
            batch = await anext(stream)
            assert batch.staleness == (0, 0)
            world.executor.mark_trained(batch)
            world.update(step + 1)


@virtual_time
async def test_group_that_grew_stale_in_the_buffer_is_dropped(tmp_path: Path) -> None:
    """prime-rl#2674. Fails when staleness is not checked as a group leaves the buffer (`_drop_stale`)."""
    async with World(tmp_path, groups_per_step=1, group_size=1) as world:
        executor = world.executor
        world.server("engine-0").token_s = 5.0
        stream = executor.batches(Prompts(None))
        executor.mark_trained(await anext(stream))  # the second group: the first is slow
        world.update(2)
        batch = await anext(stream)
        await anyio.sleep(100)  # step 2 trains, and meanwhile the first group is finished, with a staleness of 1
        assert (executor.account.buffered, executor.account.in_flight) == (2, 0)
        executor.mark_trained(batch)
        world.update(3)
        batch = await anext(stream)
        assert batch.staleness == (0,) and batch.groups[0].prompt.index != 0
        assert executor.account.reasons["dropped"] == {"stale": 1}
        world.assert_accounted()


@virtual_time
async def test_group_too_old_to_be_trained_is_given_up_in_flight(tmp_path: Path) -> None:
    """Fails without the check in `on_published`: the slow group would go on generating for nothing."""
    patience: dict[str, Any] = {"request_timeout_s": 1e6, "trajectory_timeout_s": 1e6}
    async with World(tmp_path, max_staleness=1, groups_per_step=1, group_size=1, **patience) as world:
        executor = world.executor
        slow = world.server("engine-0")
        slow.token_s = 1000.0
        stream = executor.batches(Prompts(None))
        await anyio.sleep(1500)
        for step in range(1, 4):
            executor.mark_trained(await anext(stream))
            world.update(step + 1)
            await anyio.sleep(10)
        assert executor.account.reasons["dropped"] == {"stale": 1}
        assert slow.aborts == ["g0000000000-s000-a000"]
        world.assert_accounted()


@virtual_time
async def test_reader_without_new_weights_is_told_what_it_waits_for(tmp_path: Path) -> None:
    async with World(tmp_path, max_staleness=0, publish_timeout_s=30) as world:
        stream = world.executor.batches(Prompts(None))
        world.executor.mark_trained(await anext(stream))
        with pytest.raises(WaitTimeout, match="in service newer than those of step 0"):
            await anext(stream)


@virtual_time
async def test_sample_newer_than_the_training_is_an_error(tmp_path: Path) -> None:
    """O24. Fails without the check in `TrajectoryBuffer._pop`: staleness -5 would pass."""
    async with World(tmp_path) as world:
        world.update(6)
        with pytest.raises(NegativeStaleness):
            await anext(world.executor.batches(Prompts(None), first_step=1))
