"""The section about the trainer: its ranks, how they share the work, its optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from miles.config.base import Count, Decay, Fraction, PositiveInt, Seconds, Section
from miles.trainer.parallel import ParallelSizes


class OptimizerConfig(Section):
    """`trainer.optimizer`: AdamW, and the course of its learning rate."""

    lr: Annotated[float, Field(gt=0)] = 3.0e-4
    """Peak learning rate."""

    warmup_steps: Count = 10
    """Steps over which the learning rate rises to its peak."""

    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls from its peak over the rest of `train.steps`; `constant` does not."""

    final_fraction: Fraction = 0.1
    """The learning rate of the last step, as a fraction of the peak; without effect on `constant`."""

    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""

    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """Added to the denominator of the update."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""


class TrainerConfig(Section):
    """`trainer`: the ranks that learn."""

    backend: Annotated[str, Field(min_length=1)] = "megatron"
    """What computes gradients: `megatron` (Megatron-core), or a factory of your own as `package.module:function`."""

    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a factory of your own."""

    tensor_parallel: PositiveInt = 1
    """Ranks that share one layer; divides attention heads, key/value heads and the MLP."""

    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the tokens between attention and MLP; needs `tensor_parallel` above 1."""

    pipeline_parallel: PositiveInt = 1
    """Stages the layers are cut into."""

    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of one sequence."""

    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of a layer; divides `data_parallel` x `context_parallel`."""

    data_parallel: PositiveInt = 1
    """Copies of the model that share a batch. The number of ranks is the product of all sizes but the experts'."""

    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu` (ranks talk over gloo) or `cuda` (one GPU a rank, NCCL)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters and of the forward pass; `bfloat16` (GPU only) keeps float32 main weights."""

    recompute: bool = False
    """Compute each layer's activations again in the backward pass in place of keeping them; saves memory."""

    threads: PositiveInt = 1
    """CPU threads of each rank."""

    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of one rank packed into one forward pass; how a batch is cut does not change its gradient."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    start_timeout_s: Seconds = 180.0
    """How long all ranks may take to start, meet and load the model."""

    call_timeout_s: Seconds = 600.0
    """How long one call of the trainer may take; ranks that take longer are replaced, as dead ones are."""

    rebuilds: Count = 3
    """How often new ranks may take the place of lost ones in a run; they resume where the lost ones stood."""

    bad_steps: Literal["skip", "stop"] = "skip"
    """A step whose gradient is not finite, or above `skip_grad_norm`, changes no weights and its batch is kept in the
    run's `bad_batches`: then go on, or stop the run."""

    skip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Gradient norm, before clipping, above which a step is bad; null sets no bound."""

    max_bad_steps_in_a_row: PositiveInt = 5
    """So many bad steps one after the other stop the run also under `skip`."""

    def parallel_sizes(self) -> ParallelSizes:
        """How ranks share the model and the batch. Raises ConfigError for sizes that do not fit one another."""
        return ParallelSizes(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            context=self.context_parallel,
            data=self.data_parallel,
            expert=self.expert_parallel,
            sequence=self.sequence_parallel,
        )
