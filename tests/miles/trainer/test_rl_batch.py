"""From a batch of groups to sequences: who is trained, with what advantage, mask, staleness and weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from executors.trajectory import Batch, Group, Prompt, StopReason, Trajectory, VersionSpan
from miles.algorithms.options import AlgorithmOptions, KlOptions, KlPlace, OverlongOptions
from miles.algorithms.registry import ADVANTAGES, AGGREGATIONS
from miles.trainer.rl_batch import RlBatch, prepare, sampled_sequences, token_staleness

PLAIN = AlgorithmOptions(advantage="dr_grpo", max_tokens=8)


def sample(
    length: int,
    reward: float | None,
    versions: Sequence[tuple[int, int]] | None = None,
    mask: Sequence[bool] | None = None,
    stop: StopReason = StopReason.STOP,
) -> Trajectory:
    """A response of `length` tokens; `versions` are (version, tokens), version 10 sampled all by default."""
    spans, start = [], 0
    for version, tokens in versions or ([(10, length)] if length else []):
        spans.append(VersionSpan(version, start, start + tokens, f"e{start}"))
        start += tokens
    response = tuple(range(100, 100 + length))
    logprobs = tuple(-0.5 - 0.1 * i for i in range(length))
    return Trajectory((1, 2), response, logprobs, tuple(spans), stop, reward, None if mask is None else tuple(mask))


def batch_of(*groups: Sequence[Trajectory], step: int = 10, version_steps: dict[int, int] | None = None) -> Batch:
    """Version v has the weights of step v - 1, unless said otherwise."""
    steps = {v: v - 1 for v in range(1, step + 1)} if version_steps is None else version_steps
    made = tuple(Group(f"g{i}", Prompt(i, (1, 2), ""), tuple(members), step - 3) for i, members in enumerate(groups))
    return Batch(made, step, (2,) * len(made), steps)


def advantages(prepared: RlBatch) -> list[list[float]]:
    return [list(one.advantages or ()) for one in prepared.sequences]


def test_a_group_becomes_sequences_with_its_advantages() -> None:
    batch = batch_of([sample(3, 1.0), sample(2, 0.0)], [sample(1, 0.5), sample(4, 0.5)])
    prepared = prepare(batch, PLAIN)
    assert advantages(prepared) == [[0.5] * 3, [-0.5] * 2, [0.0], [0.0] * 4]
    first = prepared.sequences[0]
    assert (first.prompt_ids, first.response_ids, first.behaviour) == ((1, 2), (100, 101, 102), (-0.5, -0.6, -0.7))
    assert first.mask is None and first.staleness == [0, 0, 0]


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "absent",
    [sample(3, None), sample(3, math.nan), sample(3, math.inf), sample(0, 100.0), sample(2, 100.0, mask=[False] * 2)],
    ids=["none", "nan", "inf", "no tokens", "all masked"],
)
def test_who_takes_no_part_changes_nothing(advantage: str, aggregation: str, absent: Trajectory) -> None:
    """O05 and OpenRLHF#1239, for every advantage and every mean. Fails when it enters a baseline or a count."""
    options = AlgorithmOptions(advantage=advantage, aggregation=aggregation, max_tokens=8)
    present = [[sample(3, 1.0), sample(2, 0.0)], [sample(1, 0.5), sample(4, 0.75)]]
    without = prepare(batch_of(*present), options)
    with_them = prepare(batch_of([*present[0], absent], [absent, *present[1]], [absent, absent]), options)
    assert with_them.sequences == without.sequences


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_weights_of_all_trained_tokens_add_up(aggregation: str) -> None:
    options = replace(PLAIN, aggregation=aggregation, max_tokens=4)
    prepared = prepare(batch_of([sample(4, 1.0), sample(4, 0.0, mask=[True, False, True, False])]), options)
    total = sum(one.weight * one.trained for one in prepared.sequences)
    assert total == pytest.approx(6 / 8 if aggregation == "sequence_sum" else 1.0)


def test_context_tokens_have_no_advantage_and_no_loss() -> None:
    mask = [True, False, False, True]
    prepared = prepare(batch_of([sample(4, 1.0, mask=mask), sample(2, 0.0)]), PLAIN)
    first = prepared.sequences[0]
    assert first.mask == mask
    assert first.advantages == [0.5, 0.0, 0.0, 0.5]
    assert [one.weight for one in prepared.sequences] == [0.25, 0.25]


def test_each_token_has_the_age_of_the_weights_that_sampled_it() -> None:
    """Fails when a token takes the age of its group."""
    resumed = sample(6, 1.0, [(7, 2), (9, 3), (10, 1)])
    batch = batch_of([resumed, sample(2, 0.0)])
    assert token_staleness(resumed, batch, 2) == [3, 3, 1, 1, 1, 0]
    assert prepare(batch, PLAIN).sequences[0].staleness == [3, 3, 1, 1, 1, 0]
    unknown = batch_of([resumed, sample(2, 0.0)], version_steps={10: 9})
    assert token_staleness(resumed, unknown, 2) == [2, 2, 2, 2, 2, 0]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(8, 5), (10, 3)], [False] * 5 + [True] * 3),
        ([(6, 1), (7, 2), (8, 2), (10, 3)], [False] * 5 + [True] * 3),
        ([(8, 2), (10, 1), (8, 1), (10, 2)], [False, False, True, False, True, True]),
    ],
)
def test_masking_old_tokens_keeps_the_length_over_repeated_aborts(
    spans: list[tuple[int, int]], expected: list[bool]
) -> None:
    """O13: five old tokens and three new ones are 0,0,0,0,0,1,1,1. Fails when the mask is that of the last piece."""
    length = len(expected)
    options = replace(PLAIN, max_token_staleness=1)
    prepared = prepare(batch_of([sample(length, 1.0, spans), sample(2, 0.0)]), options)
    first = prepared.sequences[0]
    assert first.mask == expected
    assert first.advantages is not None and len(first.advantages) == length == len(first.response_ids)
    assert [value != 0 for value in first.advantages] == expected
    assert first.weight == pytest.approx(1 / (sum(expected) + 2))


def test_an_old_token_that_is_context_stays_masked_and_all_old_takes_no_part() -> None:
    options = replace(PLAIN, max_token_staleness=0)
    mixed = sample(4, 1.0, [(9, 2), (10, 2)], mask=[True, False, False, True])
    old = sample(3, 9.0, [(9, 3)])
    prepared = prepare(batch_of([mixed, old, sample(1, 0.0)]), options)
    assert [len(one.response_ids) for one in prepared.sequences] == [4, 1]
    assert prepared.sequences[0].mask == [False, False, False, True]
    assert prepared.sequences[0].advantages == [0.0, 0.0, 0.0, 0.5]


def test_responses_near_the_limit_lose_reward_little_by_little() -> None:
    """DAPO's soft punishment, before the baseline; the logged reward is the verifier's."""
    options = replace(PLAIN, overlong=OverlongOptions(4, 0.5))
    prepared = prepare(batch_of([sample(2, 1.0), sample(6, 1.0), sample(8, 1.0)]), options)
    mean = (1.0 + 0.75 + 0.5) / 3
    assert [values[0] for values in advantages(prepared)] == pytest.approx([1.0 - mean, 0.75 - mean, 0.5 - mean])
    assert prepared.metrics["reward"] == 1.0


def test_a_kl_in_the_reward_is_subtracted_token_by_token_before_advantages() -> None:
    """REINFORCE++: the return of a token has the penalties from there on. Fails when masked tokens cost something."""
    options = AlgorithmOptions(advantage="reinforce_plus_plus", kl=KlOptions(0.1, "k1", "reward"), max_tokens=8)
    batch = batch_of([sample(3, 1.0, mask=[True, False, True]), sample(2, 0.0)])
    asked = [one for one in sampled_sequences(batch) if one is not None]
    assert [(one.prompt_ids, one.response_ids) for one in asked] == [((1, 2), (100, 101, 102)), ((1, 2), (100, 101))]
    prepared = prepare(batch, options, [[-1.0, 5.0, -1.7], [-0.5, -0.1]])
    returns = [1.0 - 0.1 * (0.5 + 1.0), 1.0 - 0.1 * 1.0, 0.0 + 0.1 * 0.5, 0.0 + 0.1 * 0.5]
    mean = sum(returns) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in returns) / 4)
    first, second = advantages(prepared)
    assert [first[0], first[2], *second] == pytest.approx([(value - mean) / std for value in returns], rel=1e-6)
    assert first[1] == 0.0
    assert prepared.metrics["kl"] == pytest.approx((0.5 + 1.0 + 0.0 - 0.5) / 4)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_advantage_takes_a_kl_in_the_reward(advantage: str, estimator: str) -> None:
    options = AlgorithmOptions(advantage=advantage, kl=KlOptions(0.1, estimator, "reward"), max_tokens=8)
    batch = batch_of([sample(3, 1.0), sample(0, 0.0), sample(2, None), sample(2, 1.0)])
    prepared = prepare(batch, options, [[-900.0, 0.0, -0.7], [], [-1.0, -1.0], [-0.5, -0.6]])
    values = [value for one in advantages(prepared) for value in one]
    assert len(values) == 5 and all(map(math.isfinite, values)) and any(values)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_sequences_carry_their_own_reference_logprobs(place: KlPlace) -> None:
    """Whole, whatever is masked. Fails when those who take no part shift the others' values."""
    options = replace(PLAIN, kl=KlOptions(0.1, "k1", place))
    batch = batch_of([sample(0, 1.0), sample(3, 1.0, mask=[True, False, True]), sample(2, None), sample(1, 0.0)])
    prepared = prepare(batch, options, [[], [-1.0, -2.0, -3.0], [-4.0, -5.0], [-6.0]])
    assert [one.reference for one in prepared.sequences] == [[-1.0, -2.0, -3.0], [-6.0]]
    assert all(one.reference is None for one in prepare(batch, PLAIN).sequences)


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (None, "needs the reference model's logprobs"),
        ([[-1.0] * 3], "of 1 trajectories for a batch of 2"),
        ([[-1.0] * 2, [-1.0] * 2], "3 response tokens but 2 reference logprobs"),
    ],
)
def test_reference_logprobs_that_do_not_fit_are_refused(
    reference: list[list[float]] | None, said: str, place: KlPlace
) -> None:
    options = replace(PLAIN, kl=KlOptions(0.1, "k1", place))
    with pytest.raises(ValueError, match=said):
        prepare(batch_of([sample(3, 1.0), sample(2, 0.0)]), options, reference)


def test_what_the_rollouts_looked_like() -> None:
    batch = batch_of(
        [sample(4, 1.0, [(8, 1), (10, 3)]), sample(2, 0.0, [(9, 2)])],
        [sample(8, 0.5, stop=StopReason.LENGTH), sample(6, 0.5, stop=StopReason.LENGTH), sample(0, None)],
    )
    metrics = prepare(batch, PLAIN).metrics
    expected = {
        "reward": 0.5,
        "reward_std": math.sqrt(0.125),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "response_length": 4.0,
        "response_length_min": 0.0,
        "response_length_max": 8.0,
        "truncated": 0.4,
        "abstained": 1.0,
        "flat_groups": 1.0,
        "staleness_0": 17 / 20,
        "staleness_1": 2 / 20,
        "staleness_2": 1 / 20,
        "advantage_std": math.sqrt((6 * 0.25) / 20 - (0.5 * 4 - 0.5 * 2) ** 2 / 400),
    }
    assert metrics == pytest.approx(expected)


def test_a_batch_without_rewards_has_nothing_to_train() -> None:
    prepared = prepare(batch_of([sample(2, None), sample(0, 1.0)]), replace(PLAIN, aggregation="sequence_mean"))
    assert prepared.sequences == ()
    assert prepared.metrics["reward"] == 1.0 and prepared.metrics["abstained"] == 1.0
    none = prepare(batch_of([sample(2, None)]), PLAIN)
    assert math.isnan(none.metrics["reward"]) and none.metrics["flat_groups"] == 1.0
