"""The loss of each token that a configuration asks for: policy loss, importance correction, KL and entropy in one.

    values = weight * policy loss(ratio to `old`) + kl.coefficient * KL - entropy_coefficient * entropy

`old` is the policy that sampled, or with a correction the proximal one, and `weight` is then the correction's. Made by
the trainer from `AlgorithmOptions` and called with each micro-batch; it never sees how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from miles.algorithms import registry
from miles.algorithms.options import AlgorithmOptions, KlGradient
from miles.algorithms.proximal import interpolated, recomputed
from miles.algorithms.tokens import MAX_LOG_RATIO, TokenLoss, TrainedTokens, ratio_of

if TYPE_CHECKING:
    from torch import Tensor

_PROXIMAL = {"recomputed": recomputed, "interpolated": interpolated}


class Objective:
    """Raises ConfigError for a name or an option that does not exist."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options
        self._loss = registry.load("loss", options.loss, options.loss_options)
        correction = options.correction
        self._correct = None if correction is None else registry.load("correction", correction.name, correction.options)
        self._proximal = None if correction is None else _PROXIMAL[correction.proximal]
        self._kl = options.kl if options.kl is not None and options.kl.place == "loss" else None
        self._estimate = None if self._kl is None else registry.load("kl", self._kl.estimator)

    @property
    def needs_entropy(self) -> bool:
        """Whether it needs a differentiable entropy."""
        return self.options.entropy_coefficient != 0

    def __call__(self, tokens: TrainedTokens) -> TokenLoss:
        """The loss of each token of a micro-batch, and what there is to log.

        Raises ValueError where `tokens` lacks what the objective needs.
        """
        old = tokens.behaviour if self._proximal is None else self._proximal(tokens)
        result: TokenLoss = self._loss(tokens, old)
        values = result.values
        ratio = ratio_of(tokens.logprobs.detach() - old)
        metrics: dict[str, Tensor] = {"ratio_mean": ratio}
        maxima: dict[str, Tensor] = {"ratio_max": ratio}
        metrics |= result.metrics
        maxima |= result.maxima
        if "clip_low" in metrics and "clip_high" in metrics:
            metrics["clip_fraction"] = metrics["clip_low"] + metrics["clip_high"]
        if self._correct is not None:
            weight: Tensor = self._correct(old - tokens.behaviour, tokens)
            values = weight * values
            metrics |= {"correction_mean": weight, "correction_masked": (weight == 0).float()}
            maxima["correction_max"] = weight
        if self._kl is not None and self._estimate is not None:
            penalty = _kl(tokens, self._estimate, self._kl.gradient)
            values = values + self._kl.coefficient * penalty
            metrics["kl"] = penalty.detach()
        if tokens.entropy is not None:
            metrics["entropy"] = tokens.entropy.detach()
        if self.needs_entropy:
            if tokens.entropy is None:
                raise ValueError("an entropy bonus needs the tokens' entropy")
            values = values - self.options.entropy_coefficient * tokens.entropy
        return TokenLoss(values, metrics, maxima)


def _kl(tokens: TrainedTokens, estimate: Callable[[Tensor], Tensor], gradient: KlGradient) -> Tensor:
    """The estimated KL of each token, [n], with the gradient that was asked for.

    With x = log(policy / reference), that of KL(policy || reference) over the policy's own samples is x times the
    gradient of logprobs, which is k2's (arXiv 2510.01555).
    """
    if tokens.reference is None:
        raise ValueError("a KL penalty needs the reference model's logprobs")
    log_ratio = (tokens.logprobs - tokens.reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if gradient == "estimator":
        return estimate(log_ratio)
    fixed = log_ratio.detach()
    return estimate(fixed) + fixed * (log_ratio - fixed)
