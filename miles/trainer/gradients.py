"""Gradients of all ranks added up: Megatron's gradient buffers around the model, and what completes them.

Sums over the tokens of the whole batch, never means: over data-parallel ranks, over tensor-parallel ranks for what each
sees in part (q/k norms; under sequence parallelism all norms and routers), over the two copies of a tied embedding.
"""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

from miles.trainer.cpu_compat import running_on_cpu


def with_gradient_buffers(model: Any, *, sharded_optimizer: bool = False) -> Any:
    """The model wrapped, once, so that backward passes add to `parameter.main_grad`, in fp32.

    `sharded_optimizer` is for one whose state is spread over data-parallel ranks; parameters then move to a buffer.
    """
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded_optimizer)
    with running_on_cpu():
        return DistributedDataParallel(model.config, config, model)


def clear(wrapped: Any) -> None:
    """Set all gradients to 0: before the first backward pass of a step."""
    wrapped.zero_grad_buffer()


def finalize(wrapped: Any) -> None:
    """Add up what the ranks have: after the last backward pass of a step. A collective over all ranks."""
    with running_on_cpu():
        finalize_model_grads([wrapped])
