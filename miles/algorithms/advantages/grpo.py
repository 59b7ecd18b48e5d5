"""GRPO: the reward next to those of its group."""

from __future__ import annotations

from collections.abc import Sequence

from miles.algorithms.advantages.sample import Sample
from miles.algorithms.advantages.spread import mean_and_std
from miles.algorithms.option_types import Margin


def grpo(groups: Sequence[Sequence[Sample]], *, eps: Margin = 0.1, scale_by_std: bool = True) -> list[list[float]]:
    """(R - mean) / (std + eps) over the group, std that of the population; without `scale_by_std`, R - mean.

    A group whose rewards are all equal, or a single sample, has advantage 0. Source: DeepSeekMath (arXiv 2402.03300).
    """
    return [_of_group([sample.total for sample in group], eps, scale_by_std) for group in groups]


def _of_group(rewards: list[float], eps: float, scale_by_std: bool) -> list[float]:
    if not rewards:
        return []
    mean, std = mean_and_std(rewards)
    scale = std + eps if scale_by_std else 1.0
    return [(reward - mean) / scale if std > 0 else 0.0 for reward in rewards]
