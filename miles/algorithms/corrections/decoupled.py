"""Decoupled PPO: one policy to measure the step from, another that sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algorithms.option_types import Bound
from miles.algorithms.tokens import TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def decoupled(log_ratio: Tensor, tokens: TrainedTokens, *, cap: Bound | None = None) -> Tensor:
    """rho = proximal / behaviour of the token, at most `cap` where given; the papers have none.

    The loss itself measures its ratio from the proximal policy, as under every correction.
    Sources: Hilton et al. (arXiv 2110.00641), for language models AReaL (arXiv 2505.24298).
    """
    ratio = ratio_of(log_ratio)
    return ratio if cap is None else ratio.clamp(max=cap)
