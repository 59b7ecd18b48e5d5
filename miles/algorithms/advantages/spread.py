"""Mean and standard deviation without rounding noise: sums are exact (`math.fsum`) and variances two-pass.

Deviations are squared as fractions of the largest one, so that a reward of 1e200 is no overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NOISE = 1e-6
"""Values that differ from their mean by less than this fraction of the largest (at least of 1) are taken for equal."""


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation of at least one value; 0 where it is only rounding noise."""
    mean = math.fsum(values) / len(values)
    deviations = [value - mean for value in values]
    largest = max(map(abs, deviations))
    if largest <= NOISE * max(1.0, *map(abs, values)):
        return mean, 0.0
    return mean, largest * math.sqrt(math.fsum((one / largest) ** 2 for one in deviations) / len(values))
