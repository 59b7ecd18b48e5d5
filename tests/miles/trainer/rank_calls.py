"""What tests run on the ranks of `tests.support.ranks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executors.trajectory import Batch
from miles.trainer import forward_backward as forward_backward_module
from miles.trainer import gradients, optimizer
from miles.trainer.forward_backward import forward_only
from miles.trainer.heads import TokenLogprobs, TrainingHead
from miles.trainer.learner import Learner
from miles.trainer.options import TrainerOptions
from miles.trainer.packing import MicroBatch, pack
from miles.trainer.sequences import TokenSequence
from miles.trainer.weights import global_tensors

Boxes = list[tuple[str, tuple[tuple[int, int], ...], Tensor]]


@dataclass
class RankRun:
    """What one rank saw."""

    logits: list[tuple[tuple[int, ...], Tensor]]
    """Of each micro-batch: indices of its sequences, and logits [n, vocab / tp] of their response tokens."""
    logprobs: list[list[float]]
    gradients: dict[str, Tensor]
    """Whole tensors of the first step, before clipping; on rank 0."""
    metrics: list[dict[str, float]]
    parameters: Boxes
    """After the last step."""


def run_learner(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Logits and logprobs of the first batch, then a step for each."""
    learner = Learner(options)
    pairs = [(one.prompt_ids, one.response_ids) for group in batches[0].groups for one in group.trajectories]
    logits = _logits(learner, pairs)
    logprobs = learner.logprobs(pairs)
    found: list[dict[str, Tensor]] = []
    apply = learner.optimizer.apply

    def keeping_gradients(*args: Any, **kwargs: Any) -> Any:
        if not found:
            own = {name: parameter.main_grad for name, parameter in learner.model.named_parameters()}
            found.append(dict(global_tensors(own, learner.arch, learner.place)))
        return apply(*args, **kwargs)

    learner.optimizer.apply = keeping_gradients  # type: ignore[method-assign]
    metrics = [learner.step(batch).metrics for batch in batches]
    parameters = [(shard.name, shard.box, shard.tensor.clone()) for shard in learner.shards()]
    return RankRun(logits, logprobs, found[0], metrics, parameters)


def run_without_finalize(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: gradients stay as each rank's backward pass left them."""
    return _with(gradients, "finalize", lambda wrapped: None, options, batches)


def run_with_means_of_means(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: each micro-batch's loss is its own mean, and those are averaged."""
    whole = TrainingHead.__call__

    def mean(self: TrainingHead, micro: MicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        loss = whole(self, micro, hidden, weight)
        return loss / micro.weights.sum().clamp(min=1e-9) / 4

    return _with(TrainingHead, "__call__", mean, options, batches)


def run_without_pad_mask(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: padding columns of the vocabulary take part in the softmax."""
    init = TokenLogprobs.__init__

    def with_padding(self: TokenLogprobs, vocab: int, *rest: Any) -> None:
        init(self, vocab + vocab % options.parallel.tensor, *rest)

    return _with(TokenLogprobs, "__init__", with_padding, options, batches)


def run_without_sequence_marks(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: norms do not say that their gradients are partial under sequence parallelism."""
    finalize = gradients.finalize

    def unmarked(wrapped: Any) -> None:
        for parameter in wrapped.module.parameters():
            parameter.sequence_parallel = False
        finalize(wrapped)

    return _with(gradients, "finalize", unmarked, options, batches)


def run_with_averaging_schedule(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: the pipeline schedule divides the loss by the number of micro-batches, as it does unless told not to."""
    schedule = forward_backward_module._schedule

    def averaging(model: Any, *args: Any, **kwargs: Any) -> None:
        model.config.calculate_per_token_loss = False
        schedule(model, *args, **kwargs)

    return _with(forward_backward_module, "_schedule", averaging, options, batches)


def run_counting_every_parameter(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: replicas and the second copy of a tied embedding enter the gradient norm too."""
    return _with(optimizer, "_counts_in_norm", lambda *_args: True, options, batches)


def run_without_expert_norm(options: TrainerOptions, batches: Sequence[Batch]) -> RankRun:
    """Control: the gradient norm is summed over ranks as if no experts lay on others."""
    init = optimizer.PortableFP32Optimizer.__init__

    def blind(self: optimizer.PortableFP32Optimizer, *args: Any) -> None:
        init(self, *args)
        self._experts = False

    return _with(optimizer.PortableFP32Optimizer, "__init__", blind, options, batches)


def _with(owner: Any, name: str, value: Callable[..., Any], options: TrainerOptions, batches: Any) -> RankRun:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        return run_learner(options, batches)
    finally:
        setattr(owner, name, kept)


def _logits(learner: Learner, pairs: Sequence[Any]) -> list[tuple[tuple[int, ...], Tensor]]:
    found = []

    def head(micro: MicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        found.append((micro.indices, hidden @ weight.t()))
        return torch.zeros(())

    sequences = [TokenSequence(*pair) for pair in pairs]
    micros = pack(sequences, learner.options.micro_batch_tokens, learner.place)
    forward_only(learner.wrapped, micros, head)
    return found
