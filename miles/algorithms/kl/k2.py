"""k2: never negative, biased in value, right in gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")


def k2(log_ratio: Number) -> Number:
    """log(policy / reference)^2 / 2. The mean of its gradient over the policy's samples is the gradient of the KL."""
    return log_ratio * log_ratio / 2
