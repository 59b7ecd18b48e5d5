"""k1: unbiased, of either sign, with a large variance."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")


def k1(log_ratio: Number) -> Number:
    """log(policy / reference). Its mean over the policy's samples is the KL; the mean of its own gradient is 0."""
    return log_ratio
