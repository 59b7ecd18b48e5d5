"""Group advantages in plain floats. Sums are exact (`math.fsum`) and variances two-pass, so equal rewards have
variance 0 and not rounding noise.

`group_advantages` decides which samples count; the functions by name see valid rewards only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

NOISE = 1e-6
"""A standard deviation below this fraction of the largest reward (at least of 1) is taken for 0."""


def group_advantages(
    rewards: Sequence[float | None],
    trainable: Sequence[bool],
    function: Callable[..., Sequence[float]],
    options: Mapping[str, object],
) -> list[float | None]:
    """Advantages of one group, None for samples that take no part: those without a finite reward (the verifier
    abstained) and those without a trainable token. They do not enter the baseline and get no loss.

    Raises ValueError when `function` returns another number of advantages, or one that is not finite.
    """
    if len(rewards) != len(trainable):
        raise ValueError(f"{len(rewards)} rewards but {len(trainable)} samples")
    valid = [
        (index, float(reward))
        for index, (reward, trains) in enumerate(zip(rewards, trainable, strict=True))
        if trains and reward is not None and math.isfinite(reward)
    ]
    advantages: list[float | None] = [None] * len(rewards)
    values = [float(value) for value in function([reward for _, reward in valid], **options)] if valid else []
    if len(values) != len(valid) or not all(math.isfinite(value) for value in values):
        raise ValueError(f"the advantage function made {values} of {len(valid)} rewards")
    for (index, _), value in zip(valid, values, strict=True):
        advantages[index] = value
    return advantages


def grpo(rewards: Sequence[float], *, eps: float = 0.1, scale_by_std: bool = True) -> list[float]:
    """(R - mean) / (std + eps), std over the group (population); without `scale_by_std`, R - mean (Dr. GRPO).

    One sample has advantage 0. Source: DeepSeekMath (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783).
    """
    if not rewards:
        return []
    mean, std = _mean_and_std(rewards)
    scale = std + eps if scale_by_std and std > 0 else 1.0
    return [(reward - mean) / scale if std > 0 else 0.0 for reward in rewards]


def rloo(rewards: Sequence[float], *, eps: float = 0.1, scale_by_std: bool = False) -> list[float]:
    """R - mean of the other samples; with `scale_by_std`, over (their std + eps).

    Siblings that are all equal have no scale: the difference is then left as it is. One sample has advantage 0.
    Source: arXiv 2402.14740.
    """
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    advantages = []
    for index, reward in enumerate(rewards):
        mean, std = _mean_and_std([*rewards[:index], *rewards[index + 1 :]])
        difference = reward - mean
        advantages.append(difference / (std + eps) if scale_by_std and std > 0 else difference)
    return advantages


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; 0 where it is only rounding noise."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return mean, std if std > NOISE * max(1.0, *map(abs, values)) else 0.0
