"""How rewards become a gradient, as one frozen value. Torch-free: the driver makes it, every rank reads it.

The names are those of `miles.algorithms.registry`, or `package.module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from controllers.errors import ConfigError

KlPlace = Literal["loss", "reward"]
KlGradient = Literal["reverse_kl", "estimator"]
Proximal = Literal["recomputed", "interpolated"]


@dataclass(frozen=True, slots=True)
class KlOptions:
    """A penalty for moving away from the reference model."""

    coefficient: float
    estimator: str = "k3"
    place: KlPlace = "loss"
    """Part of the loss, or of each token's reward before advantages are made of it."""
    gradient: KlGradient = "reverse_kl"
    """In the loss: the gradient of KL(policy || reference) whatever the estimator, or the estimator's own derivative.

    The estimator's own is what GRPO's k3 has: that of KL(reference || policy). That of k1 is 0 on average."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            _refuse("algorithm.kl.coefficient", "must be at least 0", self.coefficient)
        if self.place == "loss" and self.gradient == "estimator" and self.estimator == "k1":
            _refuse("algorithm.kl.gradient", "k1's own is 0 on average: use 'reverse_kl'", self.gradient)


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """What makes up for tokens that were sampled by another policy than the trainer's before the step."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    proximal: Proximal = "recomputed"
    """The policy from which the loss measures its ratio: the trainer's before the step, or one between it and the
    token's own, the nearer to the latter the fewer steps lie between them (A-3PO, arXiv 2512.06547).

    Where a step makes one update, the ratio to the first is 1: the correction alone then bounds what a token does."""


@dataclass(frozen=True, slots=True)
class OverlongOptions:
    """A penalty for responses that come near the length limit."""

    buffer: int
    """Tokens before the limit over which it rises."""
    penalty: float = 1.0
    """At the limit."""


@dataclass(frozen=True, slots=True)
class AlgorithmOptions:
    """From rewards to a gradient. Raises ConfigError for values that cannot work together."""

    advantage: str = "grpo"
    advantage_options: Mapping[str, object] = field(default_factory=dict)
    loss: str = "clipped"
    loss_options: Mapping[str, object] = field(default_factory=dict)
    """`clip` among them."""
    aggregation: str = "token_mean"
    max_tokens: int = 1024
    """Longest response there may be: where the overlong penalty is whole, and what `sequence_sum` divides by."""
    kl: KlOptions | None = None
    entropy_coefficient: float = 0.0
    """What an entropy of one nat earns."""
    correction: CorrectionOptions | None = None
    overlong: OverlongOptions | None = None
    max_token_staleness: int | None = None
    """Tokens sampled by weights older than so many optimizer steps are not trained."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            _refuse("rollout.max_tokens", "must be at least 1", self.max_tokens)
        if not math.isfinite(self.entropy_coefficient):
            _refuse("algorithm.entropy_coefficient", "must be a finite number", self.entropy_coefficient)
        if self.max_token_staleness is not None and self.max_token_staleness < 0:
            _refuse("algorithm.max_token_staleness", "must be at least 0", self.max_token_staleness)
        if self.overlong is not None and not 1 <= self.overlong.buffer <= self.max_tokens:
            _refuse(
                "algorithm.overlong.buffer",
                f"must be from 1 to rollout.max_tokens ({self.max_tokens})",
                self.overlong.buffer,
            )


DEFAULT_ALGORITHM = AlgorithmOptions()


def _refuse(key: str, problem: str, value: object) -> None:
    raise ConfigError(f"{key}: {problem}, got {value!r}", key=key)
