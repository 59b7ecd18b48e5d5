"""Every advantage equals its reference, and none lets a sample that takes no part, or rounding noise, change others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from miles.algorithms import registry
from miles.algorithms.advantages.batch import batch_advantages, takes_part
from miles.algorithms.advantages.sample import Advantage, Sample
from miles.algorithms.advantages.spread import mean_and_std
from tests.miles.algorithms import references
from tests.miles.algorithms.references import Rewards

Compute = Callable[[Sequence[Sequence[Sample]]], Sequence[Sequence[Advantage]]]

SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "grpo": ("grpo", {}),
    "grpo-no-std": ("grpo", {"scale_by_std": False}),
    "grpo-no-eps": ("grpo", {"eps": 0.0}),
    "dr_grpo": ("dr_grpo", {}),
    "rloo": ("rloo", {}),
    "rloo-std": ("rloo", {"scale_by_std": True}),
    "rloo-std-no-eps": ("rloo", {"scale_by_std": True, "eps": 0.0}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
}
GROUP_ONLY = [key for key in SETTINGS if not key.startswith("reinforce")]
EVERY = pytest.mark.parametrize("setting", SETTINGS)

dice = random.Random(5)
BATCHES: dict[str, list[Rewards]] = {
    "random": [[dice.gauss(0, 2) for _ in range(size)] for size in (4, 2, 7)],
    "zeros and ones": [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]],
    "one sample": [[0.7]],
    "one sample each": [[0.7], [-0.3], [2.0]],
    "all equal": [[0.1] * 5, [0.1] * 5],
    "equal in groups": [[0.1] * 5, [0.9] * 5],
    "abstentions": [[1.0, None, 0.0, 0.0], [None, math.nan], [1.0, None, None, math.inf], [2.0, 3.0, -math.inf]],
    "nobody": [[None, None], []],
    "large": [[1e8, 1e8 + 1e3, 1e8 + 5e3], [-1e8, 3.0]],
    "very long": [[dice.random() for _ in range(1000)]],
}


def function_of(setting: str) -> Compute:
    name, options = SETTINGS[setting]
    function: Compute = registry.load("advantage", name, options)
    return function


def samples(group: Rewards, tokens: Sequence[int], penalties: Sequence[Sequence[float]] | None = None) -> list[Any]:
    """Samples of a group, None for those who take no part."""
    return [
        Sample(float(reward), count, tuple(penalties[i]) if penalties else ())
        if reward is not None and takes_part(reward, count)
        else None
        for i, (reward, count) in enumerate(zip(group, tokens, strict=True))
    ]


def advantages_of(setting: str, groups: Sequence[Rewards]) -> list[list[float | None]]:
    """One number a sample, every response being of one token."""
    found = batch_advantages([samples(group, [1] * len(group)) for group in groups], function_of(setting))
    return [[None if value is None else value[0] for value in group] for group in found]


def reference_of(setting: str, groups: Sequence[Rewards]) -> list[list[float]]:
    name, options = SETTINGS[setting]
    eps: Any = options.get("eps", 0.1)
    if name in ("grpo", "dr_grpo"):
        by_std = name == "grpo" and bool(options.get("scale_by_std", True))
        return [references.grpo_advantages(group, eps, by_std) for group in groups]
    if name == "rloo":
        return [references.rloo_advantages(group, eps, bool(options.get("scale_by_std", False))) for group in groups]
    nothing = [[[0.0] for _ in references.valid(group)] for group in groups]
    found = references.reinforce_plus_plus_advantages(groups, nothing, 1e-8, name.endswith("baseline"))
    return [[sample[0] for sample in group] for group in found]


@EVERY
@pytest.mark.parametrize("groups", BATCHES.values(), ids=BATCHES)
def test_an_advantage_is_the_papers(setting: str, groups: list[Rewards]) -> None:
    found = [[value for value in group if value is not None] for group in advantages_of(setting, groups)]
    expected = reference_of(setting, groups)
    assert [len(group) for group in found] == [len(group) for group in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("baseline", [False, True])
def test_tokens_of_reinforce_plus_plus_are_normalised_over_the_batch(baseline: bool) -> None:
    """Token by token, with a KL in the reward. Fails when long responses count once, or a cost counts before it."""
    groups: list[Rewards] = [[1.0, 0.0, None], [0.5, 0.25]]
    costs = [[[0.1, -0.2, 0.3], [0.05], [9.0]], [[0.0, 0.4], [0.2, 0.1, 0.0, -0.1]]]
    function = function_of("reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus")
    found = batch_advantages(
        [samples(group, [len(each) for each in cost], cost) for group, cost in zip(groups, costs, strict=True)],
        function,
    )
    assert found[0][2] is None
    taking_part = [costs[0][:2], costs[1]]
    expected = references.reinforce_plus_plus_advantages(groups, taking_part, 1e-8, baseline)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, reference in zip([value for value in ours if value is not None], theirs, strict=True):
            assert mine == pytest.approx(reference, rel=1e-7)
    tokens = [value for group in found for sample in group if sample for value in sample]
    assert mean_and_std(tokens) == pytest.approx((0.0, 1.0), abs=1e-6)


@pytest.mark.parametrize("setting", GROUP_ONLY)
def test_a_group_baseline_takes_a_kl_in_the_reward_off_the_whole_sample(setting: str) -> None:
    charged = [Sample(1.0, 2, (0.25, 0.5)), Sample(0.5, 1, (0.0,)), Sample(0.0, 3, (-0.5, 0.0, 0.0))]
    plain = [Sample(0.25, 2), Sample(0.5, 1), Sample(0.5, 3)]
    assert function_of(setting)([charged]) == function_of(setting)([plain])


@EVERY
@pytest.mark.parametrize("high", [0.95, 0.35])
def test_rounding_noise_is_not_a_spread(setting: str, high: float) -> None:
    """O04. Fails for every advantage that divides, without NOISE in mean_and_std; for rloo, without the two passes."""
    (spiked,) = advantages_of(setting, [[0.0] + [high] * 7])
    assert all(value is not None and abs(value) <= 10 for value in spiked)
    nudged = [math.nextafter(high, 1.0) if index % 2 else high for index in range(8)]
    (level,) = advantages_of(setting, [nudged])
    assert all(value is not None and abs(value) < 1e-9 for value in level)


def test_a_leave_one_out_spread_of_equal_rewards_leaves_the_difference_as_it_is() -> None:
    """O04: 0 against seven of 0.95 has the advantage -0.95."""
    for setting in ("rloo-std", "rloo-std-no-eps"):
        assert advantages_of(setting, [[0.0] + [0.95] * 7])[0][0] == pytest.approx(-0.95)


@EVERY
@pytest.mark.parametrize("rewards", [[0.1] * 5, [1e8, 1e8], [-3.0] * 2])
def test_equal_rewards_teach_nothing(setting: str, rewards: list[float]) -> None:
    assert advantages_of(setting, [rewards]) == [[0.0] * len(rewards)]


@EVERY
@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_who_takes_no_part_changes_nothing_for_the_others(setting: str, missing: float | None) -> None:
    """O05. Fails when a missing reward counts as 0, or enters a mean."""
    with_them = advantages_of(setting, [[0.75, missing, 0.0, 0.5], [missing, missing], [0.5, 0.25]])
    without = advantages_of(setting, [[0.75, 0.0, 0.5], [], [0.5, 0.25]])
    assert with_them[0][1] is None and with_them[1] == [None, None]
    assert [[value for value in group if value is not None] for group in with_them] == without
    zeroed = advantages_of(setting, [[0.75, 0.0, 0.0, 0.5], [0.0, 0.0], [0.5, 0.25]])
    assert zeroed[0][0] != pytest.approx(with_them[0][0], rel=1e-3)


@EVERY
def test_one_valid_sample_has_advantage_zero(setting: str) -> None:
    """O05: its spread is 0, not NaN."""
    assert advantages_of(setting, [[1.0, None, None, None]]) == [[0.0, None, None, None]]


@EVERY
def test_samples_without_trainable_tokens_are_outside_the_baseline(setting: str) -> None:
    """OpenRLHF#1239: the sibling's advantage is 0, not -49.5."""
    found = batch_advantages([samples([100.0, 1.0], [0, 2])], function_of(setting))
    assert found == [[None, [0.0, 0.0]]]


@pytest.mark.parametrize(
    "answer",
    [[[1.0]], [[1.0, math.nan]], [[1.0, 2.0, 3.0]], [], [[1.0, [1.0, 2.0]]], [[1.0, [math.inf]]]],
)
def test_a_function_that_answers_nonsense_is_refused(answer: list[list[Any]]) -> None:
    with pytest.raises(ValueError, match="advantage function"):
        batch_advantages([[Sample(1.0, 2), None, Sample(0.0, 1)]], lambda groups: answer)


def test_an_advantage_may_be_one_of_each_token() -> None:
    """Room for a critic."""
    found = batch_advantages([[Sample(1.0, 2), Sample(0.0, 1)]], lambda groups: [[[0.5, -0.5], 1]])
    assert found == [[[0.5, -0.5], [1.0]]]


@pytest.mark.parametrize("scale", [1.0, 1e200, 1e-200])
def test_the_spread_of_rewards_of_any_size_is_finite(scale: float) -> None:
    """Fails where deviations are squared as they are: 1e200 squared is an OverflowError."""
    mean, std = mean_and_std([scale * value for value in (1.0, 2.0, 3.0, 6.0)])
    assert mean == pytest.approx(3.0 * scale)
    assert std == pytest.approx(3.5**0.5 * scale if scale > 1e-6 else 0.0)


@EVERY
def test_a_penalty_that_is_no_number_makes_the_step_a_bad_one(setting: str) -> None:
    """Fails where NaN runs through a standard deviation that is "not above 0": all advantages are then a quiet 0."""
    broken: list[list[Sample | None]] = [
        [Sample(1.0, 2, (0.1, math.nan)), Sample(0.0, 1, (0.0,))],
        [Sample(1.0, 1, (0.0,)), None],
    ]
    found = batch_advantages(broken, function_of(setting))
    assert found[1][1] is None
    assert all(math.isnan(value) for group in found for one in group if one is not None for value in one)
