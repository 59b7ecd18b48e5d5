"""What a policy loss sees of a micro-batch, and what it returns. The trainer fills the one and sums up the other.

Every tensor has shape [n]: one entry for each trained token of the micro-batch, sequence after sequence. A micro-batch
holds whole sequences, also under context parallelism, so a loss by sequence needs no communication.
Tensors are used by their methods only: what is built on this module needs no torch to be imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Keeps exp() finite for a token whose probability has changed beyond reason; its gradient is then 0."""


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
    reference: Tensor | None = None
    """The reference model's, where there is a KL penalty."""
    entropy: Tensor | None = None
    """Of the trainer's distribution at each token, in nats, differentiable where the objective asks for it."""
    staleness: Tensor | None = None
    """Optimizer steps between the weights that sampled each token and those now in the trainer (int64)."""

    def sequence_sums(self, values: Tensor) -> Tensor:
        """For each token the sum of `values` [n] over its sequence, [n]."""
        sums = values.new_zeros(self.sequences).index_add(0, self.sequence, values)
        return sums.index_select(0, self.sequence)

    def sequence_means(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` [n] over the trained tokens of its sequence, [n]."""
        return self.sequence_sums(values) / self.sequence_sums(values.detach().new_ones(values.shape))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss of each token. The trainer multiplies `values` by the tokens' weights and sums over the whole batch."""

    values: Tensor
    """[n], differentiable."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[n] each, without gradient; logged as means over all trained tokens of the batch."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """[n] or scalar each, without gradient; logged as the largest value of the batch."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), kept finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
