"""k3: never negative, unbiased in value, biased in gradient. GRPO's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")


def k3(log_ratio: Number) -> Number:
    """reference / policy - 1 + log(policy / reference).

    The mean of its own gradient over the policy's samples is that of KL(reference || policy), the other direction.
    """
    if isinstance(log_ratio, float):
        return math.expm1(-log_ratio) + log_ratio
    return (-log_ratio).expm1() + log_ratio
