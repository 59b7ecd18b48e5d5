"""The section about the trainer: its ranks, how they share the work, its optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from miles.config.base import Count, Fraction, OnlyOne, PositiveInt, Seconds, Section


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
