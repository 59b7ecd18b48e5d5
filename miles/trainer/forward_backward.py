"""Forward and backward passes over the micro-batches of a step, on one pipeline stage or many.

    one stage      micro-batch after micro-batch: forward, head, backward
    many stages    Megatron's 1F1B schedule; the head runs on the last stage only

The model stops before its output layer: the head gets hidden states of the tokens that are trained, and the output
weight, and so never has logits of prompt tokens. Its losses are sums: nothing here divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from miles.trainer.cpu_compat import running_on_cpu
from miles.trainer.packing import MicroBatch

Head = Callable[[MicroBatch, Tensor, Tensor], Tensor]
"""(micro-batch, hidden [n, h] of its trained tokens, output weight [vocab / tp, h]) -> the loss to add, a scalar."""


def forward_backward(model: Any, micros: Sequence[MicroBatch], head: Head) -> None:
    """Add the gradient of the sum of the head's losses to the gradients of `model`, a wrapped GPTModel.

    Every rank passes as many micro-batches. Gradients are of this rank's data only until they are finalized.
    """
    with running_on_cpu():
        if _stages(model) > 1:
            _schedule(model, micros, head, forward_only=False)
            return
        for micro in micros:
            torch.autograd.backward(head(micro, *_hidden(model, micro)))


@torch.no_grad()
def forward_only(model: Any, micros: Sequence[MicroBatch], head: Head) -> None:
    """Run the head over all micro-batches without gradients; it keeps what it is after, and its result is unused."""
    with running_on_cpu():
        if _stages(model) > 1:
            _schedule(model, micros, head, forward_only=True)
            return
        for micro in micros:
            head(micro, *_hidden(model, micro))


def _stages(model: Any) -> int:
    return int(model.config.pipeline_model_parallel_size)


def _schedule(model: Any, micros: Sequence[MicroBatch], head: Head, *, forward_only: bool) -> None:
    if not micros:
        return

    def step(upcoming: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro = next(upcoming)
        output = _output(wrapped, micro)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value = head(micro, _rows(wrapped.module, micro, hidden), _output_weight(wrapped.module))
            # With a token count in the answer and calculate_per_token_loss, the schedule leaves the sum as it is.
            return value, torch.ones((), dtype=torch.int), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micros),
        model=[model],
        num_microbatches=len(micros),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _hidden(model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    return _rows(model.module, micro, _output(model, micro)), _output_weight(model.module)


def _output(model: Any, micro: MicroBatch) -> Tensor:
    """[t, 1, h]; under sequence parallelism this rank's part of t."""
    with _without_output_layer(model.module):
        output: Tensor = model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)
    return output


def _rows(module: Any, micro: MicroBatch, hidden: Tensor) -> Tensor:
    """The last stage's hidden states of trained tokens, [n, h], the same on all tensor-parallel ranks."""
    if module.config.sequence_parallel:
        # The head's gradient comes whole to every rank: each takes its own part of it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden.squeeze(1).index_select(0, micro.rows)


def _output_weight(module: Any) -> Tensor:
    weight: Tensor = (
        module.shared_embedding_or_output_weight()
        if module.share_embeddings_and_output_weights
        else module.output_layer.weight
    )
    return weight


@contextmanager
def _without_output_layer(module: Any) -> Iterator[None]:
    kept = module.post_process
    module.post_process = False
    try:
        yield
    finally:
        module.post_process = kept
