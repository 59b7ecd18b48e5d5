"""The policy from which a corrected loss measures its ratio.

A step makes one update of its batch, so the trainer's current logprobs are those before the update.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from miles.algorithms.tokens import TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def recomputed(tokens: TrainedTokens) -> Tensor:
    """Logprobs [n] of the trainer before this step's update."""
    return tokens.logprobs.detach()


def interpolated(tokens: TrainedTokens) -> Tensor:
    """log proximal = behaviour / d + (1 - 1 / d) logprobs, [n], for a token sampled d steps ago; logprobs for d = 0.

    Needs no forward pass of its own. Raises ValueError without the tokens' staleness. Source: A-3PO (arXiv 2512.06547).
    """
    if tokens.staleness is None:
        raise ValueError("an interpolated proximal policy needs the tokens' staleness")
    current = tokens.logprobs.detach()
    share = tokens.staleness.clamp(min=1).to(current.dtype).reciprocal().where(tokens.staleness > 0, 0.0)
    # A token that the engine gave no probability at all (-inf) must not make the step NaN: 0 x -inf is.
    return current + share * (tokens.behaviour - current).nan_to_num(nan=math.nan)
