"""Log-probabilities within the tokens that top-k and top-p kept when a response was sampled.

A truncated sampler draws token y from its kept set S with p(y) / sum of p over S. Where the engine says what S was, the
trainer's log-probability is taken within the same S, so that the ratio to the engine's is that of the two samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from miles.trainer.sequences import TokenSequence

PAIRS = 65536
"""Kept tokens whose rows of the output weight are gathered at a time."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept sets of n trained tokens, m tokens in all."""

    rows: Tensor
    """[m] int64, ascending: the trained token whose set it belongs to."""
    ids: Tensor
    """[m] int64 token ids."""
    recorded: Tensor
    """[n] bool: whether there is a set."""

    def of(self, tokens: Tensor) -> KeptRows:
        """Those of some of the n trained tokens only, in ascending order."""
        place = torch.full_like(self.recorded, -1, dtype=torch.int64)
        place[tokens] = torch.arange(len(tokens), device=tokens.device)
        rows = place[self.rows]
        return KeptRows(rows[rows >= 0], self.ids[rows >= 0], self.recorded[tokens])


def kept_rows(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> KeptRows | None:
    """The kept sets of the sequences' trained tokens, in order; None where no sequence has any."""
    if all(sequence.kept is None for sequence in sequences):
        return None
    counts, ids = [], []
    for sequence in sequences:
        if sequence.kept is None:
            counts.append(torch.zeros(sequence.trained, dtype=torch.int64))
            continue
        count = _ints(sequence.kept.counts)
        own = _ints(sequence.kept.ids)
        if sequence.mask is not None:
            trained = torch.tensor(sequence.mask)
            own = own[trained.repeat_interleave(count)]
            count = count[trained]
        counts.append(count)
        ids.append(own)
    number = torch.cat(counts)
    rows = torch.arange(len(number)).repeat_interleave(number)
    return KeptRows(rows.to(device), torch.cat(ids).to(device), (number > 0).to(device))


def kept_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    full: Tensor,
    kept: KeptRows,
    *,
    temperature: float = 1.0,
    tp_group: Any,
) -> Tensor:
    """log(p(target) / sum of p over its kept set), [n] fp32, differentiable; `full` [n] where there is no set.

    p is softmax(hidden @ weight.T / temperature). `hidden` [n, h] is the same on all ranks of `tp_group` and its
    gradient is summed over them; `weight` [vocab / tp, h] are this rank's rows. Only logits of kept tokens are made.
    """
    width = weight.shape[0]
    first = tp_group.rank() * width
    rows = torch.cat((kept.rows, torch.arange(len(targets), device=targets.device)))
    columns = torch.cat((kept.ids, targets)) - first
    here = (columns >= 0) & (columns < width)
    hidden = copy_to_tensor_model_parallel_region(hidden, tp_group)
    logits = _chosen_logits(hidden, weight, rows, columns.clamp(0, width - 1)) / temperature
    m = len(kept.ids)
    values, value_here = logits[:m], here[:m]
    with torch.no_grad():
        top = torch.full_like(full, torch.finfo(torch.float32).min)
        top.scatter_reduce_(0, kept.rows[value_here], values[value_here], "amax")
        if tp_group.size() > 1:
            torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=tp_group)
        top = torch.where(kept.recorded, top, 0.0)
    # Another rank's column has a logit here that means nothing: it must not reach exp, whose overflow would be NaN.
    shifted = torch.where(value_here, values - top[kept.rows], 0.0).exp()
    total = torch.zeros_like(top).index_add(0, kept.rows, torch.where(value_here, shifted, 0.0))
    chosen = torch.where(here[m:], logits[m:], 0.0)
    total, chosen = reduce_from_tensor_model_parallel_region(torch.stack((total, chosen)), tp_group).unbind()
    # Without a set the sum is 0, whose logarithm would make the gradient of the branch not taken infinite.
    within = chosen - top - torch.where(kept.recorded, total, 1.0).log()
    return torch.where(kept.recorded, within, full)


def _chosen_logits(hidden: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    result: Tensor = _ChosenLogits.apply(hidden, weight, rows, columns)  # type: ignore[no-untyped-call]
    return result


class _ChosenLogits(torch.autograd.Function):
    """fp32 [m]: hidden[rows] @ weight[columns], pair by pair, a chunk of pairs at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, columns)
        products = [
            torch.linalg.vecdot(hidden[row].float(), weight[column].float())
            for row, column in zip(torch.split(rows, PAIRS), torch.split(columns, PAIRS), strict=True)
        ]
        return torch.cat(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, rows, columns = ctx.saved_tensors
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        chunks = (torch.split(values, PAIRS) for values in (rows, columns, grads[0].unsqueeze(1)))
        for row, column, grad in zip(*chunks, strict=True):
            of_hidden.index_add_(0, row, grad * weight[column].float())
            of_weight.index_add_(0, column, grad * hidden[row].float())
        return of_hidden.to(hidden.dtype), of_weight.to(weight.dtype), None, None


def _ints(data: bytes) -> Tensor:
    if not data:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).long()

