"""Group advantages: robust to abstentions, single samples and rounding noise."""

import math

import pytest

from miles.algorithms.advantages import group_advantages, grpo, rloo


def test_grpo_is_the_centred_reward_over_the_spread() -> None:
    assert grpo([1.0, 0.0, 0.0, 1.0], eps=0.1) == pytest.approx([0.5 / 0.6, -0.5 / 0.6, -0.5 / 0.6, 0.5 / 0.6])
    assert grpo([1.0, 0.0, 0.0, 1.0], scale_by_std=False) == [0.5, -0.5, -0.5, 0.5]


def test_rloo_compares_with_the_others() -> None:
    assert rloo([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("high", [0.95, 0.35])
@pytest.mark.parametrize("function", [grpo, rloo])
def test_rounding_noise_is_not_a_spread(function: object, high: float) -> None:
    """O04. Fails without NOISE in _mean_and_std and the two-pass sum."""
    rewards = [0.0] + [high] * 7
    assert rloo(rewards, scale_by_std=True)[0] == pytest.approx(-high)
    assert rloo(rewards, scale_by_std=True, eps=0.0)[0] == pytest.approx(-high)
    assert all(abs(value) <= 10 for value in [*rloo(rewards, scale_by_std=True), *grpo(rewards)])
    nudged = [math.nextafter(high, 1.0) if index % 2 else high for index in range(8)]
    assert all(abs(value) < 1e-9 for value in [*grpo(nudged, eps=0.0), *rloo(nudged, scale_by_std=True, eps=0.0)])


@pytest.mark.parametrize("function", [grpo, rloo])
@pytest.mark.parametrize("rewards", [[0.1] * 5, [0.7], [1e8, 1e8]])
def test_equal_rewards_teach_nothing(function: object, rewards: list[float]) -> None:
    assert callable(function)
    assert function(rewards) == [0.0] * len(rewards)


def test_abstained_samples_are_outside_the_baseline() -> None:
    """O05: mean 1/3 over the valid three, not 1/4."""
    values = group_advantages([1.0, None, 0.0, 0.0], [True] * 4, grpo, {"scale_by_std": False})
    assert values[1] is None
    assert [values[0], values[2], values[3]] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
@pytest.mark.parametrize("function", [grpo, rloo])
def test_one_valid_sample_has_advantage_zero(function: object, missing: float | None) -> None:
    """O05: its spread is 0, not NaN."""
    assert callable(function)
    assert group_advantages([1.0, missing, missing, missing], [True] * 4, function, {}) == [0.0, None, None, None]


def test_samples_without_trainable_tokens_are_outside_the_baseline() -> None:
    """OpenRLHF#1239: the sibling's advantage is 0, not -49.5."""
    assert group_advantages([100.0, 1.0], [False, True], grpo, {"scale_by_std": False}) == [None, 0.0]


def test_a_group_of_abstentions_has_no_advantages() -> None:
    assert group_advantages([None, math.nan], [True, True], grpo, {}) == [None, None]


def test_a_function_that_answers_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="advantage function"):
        group_advantages([1.0, 0.0], [True, True], lambda rewards: [1.0], {})
    with pytest.raises(ValueError, match="advantage function"):
        group_advantages([1.0], [True], lambda rewards: [math.nan], {})
