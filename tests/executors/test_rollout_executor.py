"""Streams, batches and the ways a run can end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from executors.errors import ExecutorClosed, RolloutFailed, StreamBusy
from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor
from executors.sampling_client import SamplingParams
from executors.trajectory import Batch, Group, Prompt
from tests.executors.world import OPTIONS, Prompts, Scorer, World, assert_bit_for_bit, make_prompt
from tests.fakes.lease_source import FakeLeaseSource
from tests.fakes.sampling_client import FakeSamplingClient
from tests.support.virtual_time import virtual_time


@virtual_time
async def test_batches_are_trained_one_after_the_other(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        executor = world.executor
        steps = []
        async for batch in executor.batches(Prompts(20)):
            steps.append(batch.step)
            assert len(batch.groups) == 2
            for group in batch.groups:
                for trajectory in group.trajectories:
                    assert_bit_for_bit(trajectory, 8)
            assert all(0 <= staleness <= 1 for staleness in batch.staleness)
            executor.mark_trained(batch)
            world.update(batch.step + 1)
            world.assert_accounted()
        assert steps == list(range(1, 11))
        account = executor.account
        assert (account.dispatched, account.trained, account.live) == (20, 20, 0)
        assert executor.statistics().tokens_generated == 20 * 2 * 8
        assert executor.statistics().running == 0


@virtual_time
async def test_stream_yields_groups_as_they_finish(tmp_path: Path) -> None:
    async with World(tmp_path, max_staleness=4) as world:
        lengths = {4: 8, 5: 2, 6: 5}
        for engine in ("engine-0", "engine-1"):
            world.server(engine).length_of = lambda request: lengths[len(request.input_ids)]

        class ThreePrompts(Prompts):
            def next(self) -> Prompt | None:
                prompt = super().next()
                return None if prompt is None else make_prompt(prompt.index, 4 + prompt.index)

        finished = [group.prompt.index async for group in world.executor.stream(ThreePrompts(3))]
        assert finished == [1, 2, 0]


@virtual_time
async def test_dead_prompt_source_reaches_the_waiting_reader(tmp_path: Path) -> None:
    """NeMo-RL#3488. Fails when `_supervise` does not wake the reader."""
    async with World(tmp_path) as world:

        class Broken(Prompts):
            def next(self) -> Prompt | None:
                if self.position == 1:
                    raise OSError("the file is gone")
                return super().next()

        with pytest.raises(RolloutFailed, match="the file is gone") as failed:
            await anext(world.executor.batches(Broken(None)))
        assert isinstance(failed.value.__cause__, OSError)


@virtual_time
async def test_break_and_go_on(tmp_path: Path) -> None:
    """Fails when leaving the loop ends the executor's tasks, as it does for a generator that holds a task group."""
    async with World(tmp_path) as world:
        executor, prompts = world.executor, Prompts(12)
        stream = executor.batches(prompts)
        seen: list[str] = []

        def train(batch: Batch) -> None:
            executor.mark_trained(batch)
            seen.extend(group.group_id for group in batch.groups)
            world.update(batch.step + 1)

        async for batch in stream:
            train(batch)
            break
        async for batch in stream:
            train(batch)
            break
        async for batch in executor.batches(prompts, first_step=1):
            assert batch.step == len(seen) // 2 + 1
            train(batch)
        assert len(seen) == len(set(seen)) == 12
        world.assert_accounted()


@virtual_time
async def test_one_source_and_one_reader_at_a_time(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        stream = world.executor.stream(Prompts(1))
        with pytest.raises(StreamBusy):
            world.executor.batches(Prompts(1))
        async with anyio.create_task_group() as tasks:

            async def second_reader() -> None:
                await anyio.sleep(1)
                with pytest.raises(StreamBusy):
                    await anext(stream)

            tasks.start_soon(second_reader)
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert len([group async for group in world.executor.stream(Prompts(2))]) == 2


@virtual_time
async def test_leaving_aborts_what_runs_and_keeps_the_account_honest(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world:
        stream = world.executor.batches(Prompts(None))
        await anyio.sleep(3.5)
        assert world.executor.statistics().running == 8
    account = world.executor.account
    assert (account.dispatched, account.in_flight, account.lost) == (4, 4, 0)
    assert world.executor.statistics().running == 0 and world.leases.held == 0
    assert not any(server.live for server in world.client.servers.values())
    with pytest.raises(RolloutFailed) as failed:
        await anext(stream)
    assert isinstance(failed.value.__cause__, ExecutorClosed)
    with pytest.raises(ExecutorClosed):
        world.executor.stream(Prompts(1))


@virtual_time
async def test_the_error_of_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        async with World(tmp_path) as world:
            world.executor.batches(Prompts(None))
            await anyio.sleep(1)
            raise KeyError("the trainer's")


@virtual_time
async def test_cancelling_the_owner_is_not_swallowed(tmp_path: Path) -> None:
    with anyio.move_on_after(5) as scope:
        async with World(tmp_path) as world:
            world.executor.batches(Prompts(None))
            await anyio.sleep_forever()
    assert scope.cancelled_caught


@virtual_time
async def test_group_ids_go_on_after_reopening(tmp_path: Path) -> None:
    ids: list[str] = []
    for _ in range(2):
        async with World(tmp_path) as world:
            async for group in world.executor.stream(Prompts(2)):
                assert isinstance(group, Group)
                ids.append(group.group_id)
    assert sorted(ids) == ["g0000000000", "g0000000001", "g0000000002", "g0000000003"]


def test_options_refuse_what_cannot_work() -> None:
    changes: list[dict[str, Any]]
    changes = [{"group_size": 0}, {"group_size": 1001}, {"max_staleness": -1}, {"concurrency": 1}]
    for change in changes:
        with pytest.raises(ValueError, match=next(iter(change))):
            replace(OPTIONS, **change)


@virtual_time
async def test_use_outside_the_block_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as journal:
        executor = RolloutExecutor(
            FakeLeaseSource(), FakeSamplingClient(), Scorer(), journal, OPTIONS, lambda version: version
        )
        with pytest.raises(ExecutorClosed):
            executor.batches(Prompts(1))
        with pytest.raises(ExecutorClosed):
            await executor.sample([make_prompt(0)], SamplingParams(max_new_tokens=1))
