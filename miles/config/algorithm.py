"""The section about the algorithm: how rewards become a gradient. The parts it names are in `miles.algorithms`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from miles.config.base import Count, KeyProblem, PositiveInt, Section

GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Advantages whose baseline is made of the other samples of a group."""

Name = Annotated[str, Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0)]


class KlConfig(Section):
    """`algorithm.kl`: a penalty for moving away from the weights that reinforcement learning began with."""

    coefficient: NotNegative
    """What one nat costs."""

    estimator: Name = "k3"
    """How the KL of a token is estimated: `k1` is log(policy / reference), `k2` half its square, `k3` GRPO's.

    Or `package.module:function`."""

    place: Literal["loss", "reward"] = "loss"
    """Part of the loss, or of each token's reward, before advantages are made of it."""

    gradient: Literal["reverse_kl", "estimator"] = "reverse_kl"
    """In the loss: the gradient of the KL from policy to reference, or that of the estimator (GRPO's is k3's own)."""

    @model_validator(mode="after")
    def _gradient_means_something(self) -> KlConfig:
        if self.estimator == "k1" and self.place == "loss" and self.gradient == "estimator":
            raise KeyProblem("algorithm.kl.gradient", "that of k1 is 0 on average, use 'reverse_kl'", self.gradient)
        if self.place == "reward" and self.gradient == "estimator":
            raise KeyProblem("algorithm.kl.gradient", "a KL in the reward has no gradient", self.gradient)
        return self


class CorrectionConfig(Section):
    """`algorithm.correction`: makes up for tokens sampled by older weights, or by an engine that computes otherwise."""

    name: Name
    """`tis` truncates the importance weight, `mis` and `icepop` leave out tokens where it is too large, and
    `decoupled` keeps it as it is.

    Or `package.module:function`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the correction: `cap` and `level` of `tis`, `low`, `high` and `level` of `mis`, and so on."""

    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """The policy that the loss measures its ratio from: the trainer's before the step (the ratio is then 1, since a
    step is one update), or one between it and the token's own, the nearer to the latter the fewer steps lie between
    them."""


class OverlongConfig(Section):
    """`algorithm.overlong`: a penalty that rises as a response comes near `rollout.max_tokens`."""

    buffer: PositiveInt
    """Tokens before the limit over which it rises."""

    penalty: NotNegative = 1.0
    """What is subtracted from the reward at the limit."""


class AlgorithmConfig(Section):
    """`algorithm`: what a reward does to the weights."""

    advantage: Name = "grpo"
    """How rewards become advantages: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`.

    Or `package.module:function`."""

    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage: `scale_by_std` and `eps` of `grpo` and `rloo`, `eps` of `reinforce_plus_plus`."""

    loss: Name = "clipped"
    """The policy loss: `clipped` (PPO, GRPO, DAPO), `gspo`, `cispo`, `reinforce`, or `supervised`,
    which imitates samples whatever their reward.

    Or `package.module:function`."""

    clip: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0)]] | None, Field(strict=False)
    ] = None
    """How far the ratio may fall below and rise above 1: `[low, high]`. Null takes the loss's own default:
    `[0.2, 0.28]` of `clipped`, `[3e-4, 4e-4]` of `gspo`, `[1, 4]` of `cispo`."""

    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss, such as `dual_clip` of `clipped`."""

    aggregation: Name = "token_mean"
    """The mean that tokens' losses are part of: `token_mean`, `group_token_mean`, `sequence_mean`, or `sequence_sum`
    (over a constant, for Dr. GRPO). Or `package.module:function`."""

    kl: KlConfig | None = None
    """A penalty for moving away from the reference model; null has none, and keeps no such model."""

    entropy_coefficient: Finite = 0.0
    """What an entropy of one nat earns."""

    correction: CorrectionConfig | None = None
    """An importance correction; null measures the ratio from the policy that sampled, and has none."""

    overlong: OverlongConfig | None = None
    """DAPO's penalty for responses near the length limit."""

    max_token_staleness: Count | None = None
    """Tokens sampled by weights older than so many optimizer steps are not trained; their siblings are."""
