"""What a policy loss sees of a micro-batch, and what it returns. The trainer fills the one and sums up the other.

Every tensor has shape [n]: one entry for each trained token of the micro-batch, sequence after sequence. A micro-batch
holds whole sequences, also under context parallelism, so a loss by sequence needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The n trained tokens of a micro-batch of `sequences` sequences. Only `logprobs` and `entropy` have gradients."""

    logprobs: Tensor
    """The trainer's, differentiable, at the temperature the tokens were sampled at."""
    behaviour: Tensor
    """The engine's, under which each token was sampled."""
    advantages: Tensor
    sequence: Tensor
    """Index, from 0, of the sequence each token belongs to (int64); ascending."""
    sequences: int
    proximal: Tensor | None = None
    """The trainer's before this step's update, where the objective asks for them (`needs_proximal`)."""
    reference: Tensor | None = None
    """The reference model's, where the objective asks for them (`needs_reference`)."""
    entropy: Tensor | None = None
    """Of the trainer's distribution at each token, in nats, differentiable where the objective asks for it."""
    staleness: Tensor | None = None
    """Optimizer steps between the weights that sampled each token and those now in the trainer (int64)."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of each token. The trainer multiplies `values` by the tokens' weights and sums over the whole batch."""

    values: Tensor
    """[n], differentiable."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[n] each, without gradient; logged as means over all trained tokens of the batch."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """[n] or scalar each, without gradient; logged as the largest value of the batch."""
