"""Balanced plans: complete, under the budget, even over ranks, in few micro-batches."""

import random

import pytest

from miles.trainer.balance import Plan, balanced


def lengths_like_answers(count: int, seed: int = 0) -> list[int]:
    """Many short ones, a long tail."""
    dice = random.Random(seed)
    return [min(4000, 20 + int(dice.expovariate(1 / 400))) for _ in range(count)]


def loads(plan: Plan, lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[index] for index in micro) for micro in rank] for rank in plan]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("count", [1, 3, 64, 500])
@pytest.mark.parametrize("budget", [1, 900, 8192])
def test_a_plan_holds_every_sequence_once_in_equally_many_micro_batches(ranks: int, count: int, budget: int) -> None:
    lengths = lengths_like_answers(count)
    plan = balanced(lengths, ranks, budget)
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1
    taken = [index for rank in plan for micro in rank for index in micro]
    assert sorted(taken) == list(range(count))
    for rank in plan:
        for micro in rank:
            assert len(micro) <= 1 or sum(lengths[index] for index in micro) <= budget
            assert [lengths[index] for index in micro] == sorted(lengths[index] for index in micro)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_get_nearly_equal_loads_in_few_micro_batches(ranks: int) -> None:
    """Fails when sequences are dealt out in the order they come: their sums then differ by tens of percent."""
    lengths = lengths_like_answers(256)
    plan = balanced(lengths, ranks, 8192)
    totals = [sum(rank) for rank in loads(plan, lengths)]
    assert max(totals) / min(totals) < 1.01
    dealt = [sum(lengths[rank::ranks]) for rank in range(ranks)]
    assert max(dealt) / min(dealt) > 1.05
    least = -(-sum(lengths) // (ranks * 8192))
    assert len(plan[0]) <= least + 1


def test_micro_batches_that_run_at_the_same_time_are_near_in_size() -> None:
    lengths = lengths_like_answers(256)
    for at_once in zip(*loads(balanced(lengths, 4, 4096), lengths), strict=True):
        assert max(at_once) - min(at_once) < 0.05 * max(at_once)


def test_no_sequences_make_no_micro_batches() -> None:
    assert balanced([], 3, 10) == ((), (), ())
