"""Streams, batches, admission, outcomes and the ways a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.errors import EngineRejected, WaitTimeout
from executors.errors import ExecutorClosed, NegativeStaleness, NoUsableGroups, RolloutFailed, StreamBusy
from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor
from executors.sampling_client import SamplingParams
from executors.trajectory import Batch, Group, Prompt
from tests.executors.world import OPTIONS, Prompts, Scorer, Slow, World, assert_bit_for_bit, make_prompt
from tests.fakes.lease_source import FakeLeaseSource
from tests.fakes.sampling_client import FakeSamplingClient, Refuse
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
async def test_reader_without_new_weights_is_told_what_it_waits_for(tmp_path: Path) -> None:
    async with World(tmp_path, max_staleness=0, publish_timeout_s=30) as world:
        stream = world.executor.batches(Prompts(None))
        world.executor.mark_trained(await anext(stream))
        with pytest.raises(WaitTimeout, match="in service newer than those of step 0"):
            await anext(stream)


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
async def test_training_twice_is_refused_and_counted(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        executor = world.executor
        batch = await anext(executor.batches(Prompts(2)))
        executor.mark_trained(batch)
        executor.mark_trained(batch)
        assert (executor.account.trained, executor.account.duplicated, executor.account.lost) == (2, 2, 0)


@virtual_time
async def test_sample_newer_than_the_training_is_an_error(tmp_path: Path) -> None:
    """O24. Fails without the check in `TrajectoryBuffer._pop`: staleness -5 would pass."""
    async with World(tmp_path) as world:
        world.update(6)
        with pytest.raises(NegativeStaleness):
            await anext(world.executor.batches(Prompts(None), first_step=1))


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
