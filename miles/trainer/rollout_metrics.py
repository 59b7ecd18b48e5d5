"""Numbers about the rollouts of a batch, over all of its trajectories, those that take no part included.

reward, reward_std, reward_min, reward_max    as the verifier gave them, over trajectories with one; nan without any
response_length, response_length_min, _max    tokens
truncated                                     fraction that ran into the length limit
abstained                                     trajectories without a finite reward
flat_groups                                   groups whose advantages are all 0: they teach nothing
staleness_0, staleness_1, ...                 fraction of response tokens sampled so many optimizer steps ago
advantage_std                                 over trained tokens; 0 without any
kept_fraction, kept_tokens                    fraction of response tokens with a kept set, and its mean size
routed_fraction                               fraction of input tokens whose experts the engine told
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from executors.trajectory import StopReason, Trajectory
from miles.algorithms.advantages.spread import mean_and_std


def rollout_metrics(
    trajectories: Sequence[Trajectory],
    staleness: Sequence[Sequence[int]],
    advantages: Sequence[Sequence[Sequence[float] | None]],
) -> dict[str, float]:
    """The metrics above. `staleness` is by trajectory and token; `advantages` by group, sample and trained token."""
    rewards = [one.reward for one in trajectories if one.reward is not None and math.isfinite(one.reward)]
    lengths = [len(one.response_ids) for one in trajectories]
    tokens = [value for group in advantages for sample in group for value in sample or ()]
    flat = sum(not any(value for sample in group for value in sample or ()) for group in advantages)
    truncated = sum(one.stop_reason is StopReason.LENGTH for one in trajectories)
    ages = Counter(age for each in staleness for age in each)
    return {
        **_summary("reward", rewards),
        "reward_std": mean_and_std(rewards)[1] if rewards else math.nan,
        **_summary("response_length", lengths),
        "truncated": truncated / len(lengths) if lengths else 0.0,
        "abstained": float(len(lengths) - len(rewards)),
        "flat_groups": float(flat),
        "advantage_std": mean_and_std(tokens)[1] if tokens else 0.0,
        **{f"staleness_{age}": ages[age] / ages.total() for age in range(max(ages, default=-1) + 1)},
        **_record_metrics(trajectories),
    }


def _record_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What engines told beside the tokens; nothing where none did."""
    found: dict[str, float] = {}
    kept = [one.kept.sizes() for one in trajectories if one.kept is not None]
    if kept:
        recorded = sum(size > 0 for sizes in kept for size in sizes)
        found["kept_fraction"] = recorded / sum(len(one.response_ids) for one in trajectories)
        found["kept_tokens"] = sum(map(sum, kept)) / max(1, recorded)
    routings = [one.routing for one in trajectories if one.routing is not None]
    if routings:
        inputs = sum(len(one.prompt_ids) + len(one.response_ids) - 1 for one in trajectories if one.response_ids)
        found["routed_fraction"] = sum(routing.recorded() for routing in routings) / inputs
    return found


def _summary(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {name: math.nan, f"{name}_min": math.nan, f"{name}_max": math.nan}
    return {
        name: math.fsum(values) / len(values),
        f"{name}_min": float(min(values)),
        f"{name}_max": float(max(values)),
    }
