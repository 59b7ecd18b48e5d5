"""RLOO: the reward next to those of the other samples of its group."""

from __future__ import annotations

from collections.abc import Sequence

from miles.algorithms.advantages.sample import Sample
from miles.algorithms.advantages.spread import mean_and_std
from miles.algorithms.option_types import Margin


def rloo(groups: Sequence[Sequence[Sample]], *, eps: Margin = 0.1, scale_by_std: bool = False) -> list[list[float]]:
    """R - mean of the others; with `scale_by_std`, over (their std + eps).

    Others that are all equal have no scale: the difference is then left as it is. One sample has advantage 0.
    Source: arXiv 2402.14740.
    """
    return [_of_group([sample.total for sample in group], eps, scale_by_std) for group in groups]


def _of_group(rewards: list[float], eps: float, scale_by_std: bool) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    advantages = []
    for index, reward in enumerate(rewards):
        mean, std = mean_and_std([*rewards[:index], *rewards[index + 1 :]])
        difference = reward - mean
        advantages.append(difference / (std + eps) if scale_by_std and std > 0 else difference)
    return advantages
