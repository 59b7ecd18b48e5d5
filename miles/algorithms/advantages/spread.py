"""Mean and standard deviation without rounding noise: sums are exact (`math.fsum`) and variances two-pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOISE = 1e-6
"""A standard deviation below this fraction of the largest value (at least of 1) is taken for 0."""


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation of at least one value; 0 where it is only rounding noise."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return mean, std if std > NOISE * max(1.0, *map(abs, values)) else 0.0
