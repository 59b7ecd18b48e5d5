"""The sections about learning: trainer, algorithm, train, eval and checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from miles.config.base import Count, Fraction, OnlyOne, PositiveInt, Seconds, Section

GROUP_BASELINES = frozenset({"grpo", "rloo"})
"""Advantages whose baseline is made of the other samples of a group."""


class OptimizerConfig(Section):
    """`trainer.optimizer`: AdamW with a linear warm-up and decay."""

    lr: Annotated[float, Field(gt=0)] = 3.0e-4
    """Peak learning rate."""

    warmup_steps: Count = 10
    """Steps over which the learning rate rises to its peak."""

    final_fraction: Fraction = 0.1
    """The learning rate of the last step, as a fraction of the peak."""

    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""

    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """Added to the denominator of the update."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""


class TrainerConfig(Section):
    """`trainer`: the ranks that learn."""

    backend: Literal["megatron"] = "megatron"
    """What computes gradients: Megatron-core."""

    tensor_parallel: OnlyOne = 1
    """Ranks that share one layer."""

    pipeline_parallel: OnlyOne = 1
    """Stages the layers are cut into."""

    expert_parallel: OnlyOne = 1
    """Ranks that share the experts of a layer."""

    data_parallel: OnlyOne = 1
    """Copies of the model that share a batch."""

    dtype: Literal["float32"] = "float32"
    """Type of the parameters; this version has no other."""

    threads: PositiveInt = 1
    """CPU threads of each rank."""

    micro_batch_tokens: PositiveInt = 8192
    """Most tokens packed into one forward pass; how a batch is cut does not change its gradient."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    call_timeout_s: Seconds = 600.0
    """How long one call of the trainer may take."""


class AlgorithmConfig(Section):
    """`algorithm`: what a reward does to the weights."""

    advantage: Annotated[str, Field(min_length=1)] = "grpo"
    """How rewards become advantages: `grpo` subtracts the mean of the group, `rloo` that of the other samples.

    Or `package.module:function`."""

    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage: `scale_by_std` and `eps` of the built-in ones."""

    loss: Annotated[str, Field(min_length=1)] = "clipped"
    """The policy loss: `clipped` bounds the importance ratio token by token. Or `package.module:function`."""

    clip: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]], Field(strict=False)] = (
        0.2,
        0.28,
    )
    """How far the ratio may fall below and rise above 1: `[low, high]`."""


class WarmupConfig(Section):
    """`train.warmup`: supervised steps on labels, before the first rollout."""

    steps: Count = 0
    """Supervised steps; 0 leaves the stage out."""

    examples_per_step: PositiveInt = 64
    """Examples of one such step."""

    lr: Annotated[float, Field(gt=0)] = 1.0e-3
    """Learning rate of these steps."""


class TrainConfig(Section):
    """`train`: how long, and in what portions."""

    steps: PositiveInt
    """Optimizer steps of reinforcement learning."""

    groups_per_step: PositiveInt = 16
    """Groups (prompts) of one step."""

    warmup: WarmupConfig = WarmupConfig()
    """The supervised stage before."""


class EvalConfig(Section):
    """`eval`: greedy answers to held-out prompts."""

    every: Count = 50
    """Steps between two evaluations; the first is before step 1 and the last after the last. 0 never."""

    prompts: PositiveInt = 200
    """Held-out prompts of one evaluation."""


class CheckpointConfig(Section):
    """`checkpoint`: what survives the run."""

    every: Count = 50
    """Steps between two checkpoints, besides the one after the warm-up and, unless this is 0, the last step's."""

    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
