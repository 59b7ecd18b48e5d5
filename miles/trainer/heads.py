"""What becomes of the hidden states of trained tokens: a loss with its metrics, or log-probabilities to keep.

Called by `forward_backward` for each micro-batch, on the last pipeline stage. Both take log-probabilities over tensor-
parallel ranks at the temperature of the rollouts, within the tokens that sampling kept where those are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from miles.algorithms.tokens import TokenLoss, TrainedTokens
from miles.trainer.context_parallel import spread
from miles.trainer.fused_logprobs import linear_logprobs
from miles.trainer.kept_tokens import kept_logprobs
from miles.trainer.packing import MicroBatch
from miles.trainer.tally import Tally

Loss = Callable[[TrainedTokens], TokenLoss]


class TokenLogprobs:
    """Log-probabilities and entropies of a micro-batch's trained tokens."""

    def __init__(self, vocab: int, temperature: float, tp_group: Any, cp_group: Any = None) -> None:
        self._vocab = vocab
        self._temperature = temperature
        self._tp_group = tp_group
        self._cp_group = cp_group

    def __call__(self, micro: MicroBatch, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Both [n] in fp32, differentiable in hidden [n, h] and weight [vocab / tp, h].

        Under context parallelism `hidden` are those that this rank holds; the answer is that of all.
        """
        targets = micro.targets if micro.held is None else micro.targets.index_select(0, micro.held)
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            targets,
            vocab=self._vocab,
            temperature=self._temperature,
            tp_group=self._tp_group,
        )
        if micro.kept is not None:
            logprobs = kept_logprobs(
                hidden,
                weight,
                targets,
                logprobs,
                micro.kept,
                temperature=self._temperature,
                tp_group=self._tp_group,
            )
        if micro.held is not None:
            both = torch.stack((logprobs, entropy), 1)
            logprobs, entropy = spread(both, micro.held, len(micro.targets), self._cp_group).unbind(1)
        return logprobs, entropy


class TrainingHead:
    """The weighted sum of a loss over a micro-batch's tokens; keeps its metrics in a tally.

    `sampled` is for tokens that an engine sampled: its logprobs are compared with the trainer's.
    """

    def __init__(self, logprobs: TokenLogprobs, loss: Loss, *, sampled: bool, entropy_gradient: bool) -> None:
        self.tally = Tally()
        self._logprobs = logprobs
        self._loss = loss
        self._sampled = sampled
        self._entropy_gradient = entropy_gradient

    def __call__(self, micro: MicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """The loss to add to the others, a scalar."""
        logprobs, entropy = self._logprobs(micro, hidden, weight)
        if micro.is_filler:
            return (logprobs * micro.weights).sum()
        result = self._loss(
            TrainedTokens(
                logprobs=logprobs,
                behaviour=micro.behaviour,
                advantages=micro.advantages,
                sequence=micro.sequence,
                sequences=len(micro.indices),
                reference=micro.reference,
                entropy=entropy if self._entropy_gradient else entropy.detach(),
                staleness=micro.staleness,
            )
        )
        self._count(micro, result, logprobs.detach(), entropy.detach())
        return (result.values * micro.weights).sum()

    def _count(self, micro: MicroBatch, result: TokenLoss, logprobs: Tensor, entropy: Tensor) -> None:
        tally = self.tally
        # Not the returned loss itself: a schedule may scale that in place.
        tally.add("loss", result.values.detach() * micro.weights)
        values = {"entropy": entropy} | result.metrics
        maxima = dict(result.maxima)
        if self._sampled:
            difference = micro.behaviour - logprobs
            distance = difference.abs()
            values |= {"kl_behaviour": difference, "logprob_diff_mean": distance}
            maxima["logprob_diff_max"] = distance
            for age in micro.ages:
                of_age = micro.staleness == age
                tally.add(f"tokens_stale_{age}", of_age)
                tally.add(f"logprob_diff_stale_{age}", distance * of_age)
                maxima[f"logprob_diff_stale_{age}_max"] = distance * of_age
        for name, value in values.items():
            tally.add(name, value)
        for name, value in maxima.items():
            tally.raise_to(name, value)


class LogprobHead:
    """Keeps the log-probability of each trained token, by the index of its sequence."""

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self.found: list[tuple[MicroBatch, Tensor]] = []
        self._logprobs = logprobs

    def __call__(self, micro: MicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """A loss that is not one."""
        logprobs, _ = self._logprobs(micro, hidden, weight)
        if not micro.is_filler:
            self.found.append((micro, logprobs.detach()))
        return torch.zeros((), device=logprobs.device)
