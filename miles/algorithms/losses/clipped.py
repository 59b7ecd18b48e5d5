"""PPO's clipped surrogate: the loss of PPO, GRPO and, with a higher upper bound, of DAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from miles.algorithms.option_types import Clip
from miles.algorithms.tokens import TokenLoss, TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor


def clipped(
    tokens: TrainedTokens,
    old: Tensor,
    *,
    clip: Clip = (0.2, 0.28),
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with r = exp(logprobs - old) and `clip` = (low, high).

    With `dual_clip` = c, a negative advantage pushes no harder than c times itself: -max(min(...), c A) where A < 0.
    Sources: PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300), bounds of two sizes (clip-higher) DAPO
    (arXiv 2503.14476), dual clip (arXiv 1912.09729).
    """
    low, high = clip
    advantages = tokens.advantages
    ratio = ratio_of(tokens.logprobs - old)
    gains = (ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    moved = ratio.detach()
    metrics = {
        "clip_low": ((moved < 1.0 - low) & (advantages < 0)).float(),
        "clip_high": ((moved > 1.0 + high) & (advantages > 0)).float(),
    }
    if dual_clip is not None:
        floor = dual_clip * advantages
        metrics["clip_dual"] = ((advantages < 0) & (gains.detach() < floor)).float()
        gains = gains.maximum(floor).where(advantages < 0, gains)
    return TokenLoss(-gains, metrics)
