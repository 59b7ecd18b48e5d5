"""A trajectory that outlives its engine: breaks, aborts, drains, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from controllers.errors import EngineRejected, FleetDegraded
from executors.errors import RolloutFailed, TrajectoryFailed
from executors.sampling_client import SamplingParams
from executors.trajectory import StopReason, Trajectory, VersionSpan
from tests.executors.world import Prompts, World, assert_bit_for_bit, make_prompt
from tests.fakes.lease_source import FakeLeaseSource, FakeLife
from tests.fakes.sampling_client import (
    FIRST_TOKEN,
    AbortByEngine,
    Break,
    Hang,
    Mislabel,
    Refuse,
    logprob_of,
)
from tests.support.virtual_time import virtual_time


async def sample_one(world: World, prompt_tokens: int, max_new_tokens: int, **sampling: Any) -> Trajectory:
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    (trajectory,) = await world.executor.sample([make_prompt(0, prompt_tokens)], params)
    return trajectory


@virtual_time
async def test_resumed_sample_asks_only_for_what_is_left_of_its_budget(tmp_path: Path) -> None:
    """O12. Fails when the retry asks for `sampling.max_new_tokens` instead of `stream.remaining`."""
    async with World(tmp_path, max_context=2048, token_s=0.01) as world:
        world.server("engine-0").faults.append(AbortByEngine(after=600))
        trajectory = await sample_one(world, 1000, 1000)
        asked = [request.sampling.max_new_tokens for request in world.client.requests]
        assert asked == [1000, 400]
        assert_bit_for_bit(trajectory, 1000)
        assert trajectory.stop_reason is StopReason.LENGTH


@virtual_time
async def test_budget_respects_the_context(tmp_path: Path) -> None:
    async with World(tmp_path, max_context=50) as world:
        trajectory = await sample_one(world, 40, 1000)
        assert_bit_for_bit(trajectory, 10)


@virtual_time
async def test_used_up_budget_sends_no_request(tmp_path: Path) -> None:
    """O12. Fails without the check of `stream.stop_reason()` after an interruption."""
    async with World(tmp_path) as world:
        world.server("engine-0").faults.append(Break(after=8))
        trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        assert trajectory.stop_reason is StopReason.LENGTH
        assert len(world.client.requests) == 1


@virtual_time
async def test_received_stop_token_ends_a_broken_sample(tmp_path: Path) -> None:
    """The connection breaks between the stop token and the word that it stopped: nothing may follow it."""
    async with World(tmp_path) as world:
        world.server("engine-0").faults.append(Break(after=6))
        trajectory = await sample_one(world, 4, 8, stop_token_ids=(FIRST_TOKEN + 9,))
        assert_bit_for_bit(trajectory, 6)
        assert trajectory.stop_reason is StopReason.STOP
        assert len(world.client.requests) == 1


@virtual_time
async def test_logprobs_and_spans_stay_aligned_over_repeated_aborts(tmp_path: Path) -> None:
    """O13's kind: what is stitched together has one logprob and one version for each token."""
    async with World(tmp_path, engines=3) as world:
        for engine, version in (("engine-0", 3), ("engine-1", 1), ("engine-2", 2)):
            world.server(engine).version = version
            world.leases.update(engine, version)
            world.server(engine).faults.append(AbortByEngine(after=5))
        trajectory = await sample_one(world, 4, 20)
        assert_bit_for_bit(trajectory, 20)
        assert trajectory.oldest_version == min(span.version for span in trajectory.spans)
        assert len(trajectory.response_ids) == len(trajectory.logprobs) == trajectory.spans[-1].end == 20


@virtual_time
async def test_orphan_is_aborted_before_the_retry(tmp_path: Path) -> None:
    """O15. Fails without the abort for `_LEAVES_ORPHAN`: two generations of one sample would live at once."""
    async with World(tmp_path) as world:
        first, second = world.server("engine-0"), world.server("engine-1")
        first.faults.append(Break(after=20))
        most_live = 0

        def count_live() -> None:
            nonlocal most_live
            most_live = max(most_live, len(first.live) + len(second.live))

        world.client.on_event = count_live
        trajectory = await sample_one(world, 4, 40)
        assert_bit_for_bit(trajectory, 40)
        assert most_live == 1
        assert first.aborts == ["e0000000000-s000-a000"]
        assert [request.request_id for request in second.requests] == ["e0000000000-s000-a001"]
        assert world.leases.held == 0


@virtual_time
async def test_hung_abort_does_not_hold_the_retry_back(tmp_path: Path) -> None:
    async with World(tmp_path, abort_timeout_s=1.0) as world:
        server = world.server("engine-0")
        server.hang_aborts = True
        server.faults.append(Hang(after=3))
        trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        idle = anyio.current_time() - (3 + 1.0 + 5)  # less the tokens, the limit of the abort, and the other tokens
        assert 30 <= idle <= 33


@virtual_time
async def test_request_ids_have_one_length_and_none_is_a_prefix_of_another(tmp_path: Path) -> None:
    async with World(tmp_path, token_s=0.0) as world:
        world.server("engine-0").faults.extend([AbortByEngine(after=0)] * 5)
        prompts = [make_prompt(index) for index in range(12)]
        await world.executor.sample(prompts, SamplingParams(max_new_tokens=2))
        ids = [request.request_id for request in world.client.requests]
        assert len(set(ids)) == len(ids) == 17
        assert len({len(request_id) for request_id in ids}) == 1


@virtual_time
async def test_refusal_is_not_retried(tmp_path: Path) -> None:
    """O15. Fails when RetryElsewhere does not give up on HTTP 4xx."""
    async with World(tmp_path) as world:
        for engine in ("engine-0", "engine-1"):
            world.server(engine).faults.extend([Refuse(EngineRejected("no such thing", status=422))] * 60)
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 8)
        assert failed.value.reason == "rejected_422"
        assert len(world.server("engine-0").faults) + len(world.server("engine-1").faults) == 119


@virtual_time
async def test_overload_is_retried_elsewhere(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.server("engine-0").faults.append(Refuse(EngineRejected("busy", status=503)))
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)
        assert len(world.server("engine-1").requests) == 1


@virtual_time
async def test_drain_hands_the_sample_over_bit_for_bit(tmp_path: Path) -> None:
    """Fails when the tokens of a revoked lease are discarded, or its request is left to run to its end."""
    async with World(tmp_path) as world:
        old = world.server("engine-0")
        old.version = 1
        async with anyio.create_task_group() as tasks:

            async def drain() -> None:
                await anyio.sleep(5.5)
                new = world.server("engine-1")
                new.version = 2
                world.leases.update("engine-1", 2)
                world.leases.drain("engine-0", grace_s=10)

            tasks.start_soon(drain)
            trajectory = await sample_one(world, 4, 12)
        assert_bit_for_bit(trajectory, 12)
        assert trajectory.spans == (VersionSpan(1, 0, 5, "engine-0.0"), VersionSpan(2, 5, 12, "engine-1.0"))
        assert trajectory.logprobs[4] == logprob_of(8, 1) and trajectory.logprobs[5] == logprob_of(9, 2)
        assert old.aborts == ["e0000000000-s000-a000"]
        assert anyio.current_time() == pytest.approx(5.5 + 7)  # at once: the drain's ten seconds are not waited for


@virtual_time
async def test_revoked_request_on_a_hung_engine_is_left_at_the_deadline(tmp_path: Path) -> None:
    """Fails without `hand_over` moving the deadline: the sample would wait for `request_timeout_s`."""
    async with World(tmp_path, abort_timeout_s=2.0) as world:
        old = world.server("engine-0")
        old.faults.append(Hang(after=3))
        old.hang_aborts = True
        async with anyio.create_task_group() as tasks:

            async def drain() -> None:
                await anyio.sleep(5)
                world.leases.drain("engine-0", grace_s=1.0)

            tasks.start_soon(drain)
            trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        assert anyio.current_time() == pytest.approx(5 + 1.0 + 5)


@virtual_time
async def test_answer_of_another_incarnation_is_dropped_and_counted(tmp_path: Path) -> None:
    """Fails when `end_attempt` does not compare the label's incarnation with the lease's."""
    async with World(tmp_path) as world:
        world.server("engine-0").faults.append(Mislabel("engine-0.7:1"))
        world.server("engine-1").faults.append(Mislabel("engine-1.0:none"))
        trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        assert world.executor.statistics().stale_answers_dropped == 2
        assert len(world.client.requests) == 3
        assert {span.version for span in trajectory.spans} == {1}


@virtual_time
async def test_dropping_a_foreign_answer_keeps_the_tokens_before_it(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.server("engine-0").faults.append(AbortByEngine(after=3))
        world.server("engine-0").faults.append(Mislabel("nobody:1"))
        trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        assert [len(request.input_ids) for request in world.client.requests] == [4, 7, 7]


@virtual_time
async def test_tokens_without_labels_take_the_version_at_the_grant(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1) as world:
        world.server("engine-0").labels = False
        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                await anyio.sleep(4.5)
                world.update(2)

            tasks.start_soon(update)
            trajectory = await sample_one(world, 4, 8)
        assert trajectory.spans == (VersionSpan(1, 0, 8, "engine-0.0"),)
        assert trajectory.logprobs[7] == logprob_of(11, 2)


@virtual_time
async def test_update_in_place_is_seen_in_the_spans(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1) as world:
        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                await anyio.sleep(4.5)
                world.update(2)

            tasks.start_soon(update)
            trajectory = await sample_one(world, 4, 8)
        assert trajectory.spans == (VersionSpan(1, 0, 4, "engine-0.0"), VersionSpan(2, 4, 8, "engine-0.0"))


@virtual_time
async def test_partial_restart_begins_again(tmp_path: Path) -> None:
    """slime#2092: with partial rollouts off no sample is stitched from several requests."""
    async with World(tmp_path, partial="restart") as world:
        world.server("engine-0").faults.append(AbortByEngine(after=5))
        trajectory = await sample_one(world, 4, 8)
        assert_bit_for_bit(trajectory, 8)
        assert [len(request.input_ids) for request in world.client.requests] == [4, 4]


@virtual_time
async def test_partial_restart_gives_up_in_the_end(tmp_path: Path) -> None:
    """Fails when tokens that are thrown away count as progress: it would go on for ever."""
    async with World(tmp_path, partial="restart", max_retries=3) as world:
        for engine in ("engine-0", "engine-1"):
            world.server(engine).faults.extend([AbortByEngine(after=5)] * 50)
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 8)
        assert failed.value.reason == "retries_exhausted_aborted"
        assert len(world.client.requests) == 4


@virtual_time
async def test_partial_drop_drops_what_has_tokens_and_retries_what_has_none(tmp_path: Path) -> None:
    async with World(tmp_path, partial="drop") as world:
        world.server("engine-0").faults.append(AbortByEngine(after=0))
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)
        world.server("engine-0").faults.append(AbortByEngine(after=1))
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 8)
        assert (failed.value.outcome, failed.value.reason) == ("dropped", "interrupted")


@virtual_time
async def test_retries_end(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1, max_retries=3) as world:
        world.server("engine-0").faults.extend([Break(after=0)] * 50)
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 8)
        assert failed.value.reason == "retries_exhausted_unreachable"
        assert len(world.client.requests) == 4


@virtual_time
async def test_progress_renews_the_retries(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1, max_retries=1) as world:
        world.server("engine-0").faults.extend([AbortByEngine(after=1)] * 7)
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)
        assert world.executor.statistics().retries == 7


@virtual_time
async def test_retries_are_counted_from_the_last_progress(tmp_path: Path) -> None:
    """Fails when `in_a_row` is not reset: three breaks with tokens and three without would be six."""
    async with World(tmp_path, engines=1, max_retries=3) as world:
        world.server("engine-0").faults.extend([Break(after=1)] * 3 + [Break(after=0)] * 3)
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)


@virtual_time
async def test_lease_revoked_before_its_use_sends_nothing(tmp_path: Path) -> None:
    """Invariant 1. Fails without the check of `lease.revoked` in `_attempt`."""

    class RevokedOnGrant(FakeLeaseSource):
        async def _pick(self, exclude: frozenset[str], timeout_s: float) -> FakeLife:
            life = await super()._pick(exclude, timeout_s)
            if life.engine == "engine-0":
                self.drain("engine-0", grace_s=5)
            return life

    async with World(tmp_path, leases=RevokedOnGrant()) as world:
        old = world.server("engine-0")
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)
        assert old.requests == []


@virtual_time
async def test_trajectory_has_a_deadline_and_leaves_no_orphan(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1, trajectory_timeout_s=20) as world:
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 60)
        assert failed.value.reason == "trajectory_timeout"
        assert anyio.current_time() == 20
        assert not world.server("engine-0").live
        assert world.server("engine-0").aborts == ["e0000000000-s000-a000"]


@virtual_time
async def test_waiting_for_a_busy_engine_is_not_a_failure(tmp_path: Path) -> None:
    """64 samples of 8 s on one slot wait 500 s, far over both deadlines, while the engine makes progress."""
    one_slot = FakeLeaseSource(capacity=1)
    async with World(tmp_path, engines=1, leases=one_slot, trajectory_timeout_s=20, lease_timeout_s=20) as world:
        prompts = [make_prompt(index) for index in range(64)]
        results = await world.executor.sample(prompts, SamplingParams(max_new_tokens=8))
        assert len(results) == 64


@virtual_time
async def test_no_engine_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    async with World(tmp_path, engines=0) as world:
        with pytest.raises(TrajectoryFailed) as failed:
            await sample_one(world, 4, 8)
        assert failed.value.reason == "no_engine"
        assert anyio.current_time() == 60


@virtual_time
async def test_degraded_fleet_reaches_the_caller(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.leases.close()
        with pytest.raises(FleetDegraded):
            await sample_one(world, 4, 8)
        with pytest.raises(RolloutFailed) as failed:
            await anext(world.executor.batches(Prompts(None)))
        assert isinstance(failed.value.__cause__, FleetDegraded)


@virtual_time
async def test_sole_engine_is_used_again_after_a_hiccup(tmp_path: Path) -> None:
    async with World(tmp_path, engines=1) as world:
        world.server("engine-0").faults.append(Break(after=2))
        assert_bit_for_bit(await sample_one(world, 4, 8), 8)
        assert anyio.current_time() < 12

