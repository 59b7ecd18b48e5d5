"""Log-probabilities within the tokens that top-k and top-p kept when a response was sampled.

A truncated sampler draws token y from its kept set S with p(y) / sum of p over S. Where the engine says what S was, the
trainer's log-probability is taken within the same S, so that the ratio to the engine's is that of the two samplers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from miles.trainer.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept sets of n trained tokens, m tokens in all."""

    rows: Tensor
    """[m] int64, ascending: the trained token whose set it belongs to."""
    ids: Tensor
    """[m] int64 token ids."""
    recorded: Tensor
    """[n] bool: whether there is a set."""


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


def kept_logprobs(scaled: Tensor, targets: Tensor, full: Tensor, kept: KeptRows, tp_group: Any) -> Tensor:
    """log(p(target) / sum of p over its kept set), [n], differentiable; `full` [n] where there is no set.

    `scaled` are logits / temperature [n, vocab / tp] of the current TP group, as `logprobs.scaled_logits` makes them.
    """
    width = scaled.shape[-1]
    first = tp_group.rank() * width
    here, local = _local(kept.ids - first, width)
    values = scaled[kept.rows, local]
    floor = torch.finfo(scaled.dtype).min
    with torch.no_grad():
        top = torch.full_like(scaled[:, 0], floor)
        top.scatter_reduce_(0, kept.rows, torch.where(here, values, floor), "amax")
        if tp_group.size() > 1:
            torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=tp_group)
        top = torch.where(kept.recorded, top, 0.0)
    weights = torch.where(here, (values - top[kept.rows]).exp(), 0.0)
    total = torch.zeros_like(top).index_add(0, kept.rows, weights)
    target_here, target = _local(targets - first, width)
    chosen = torch.where(target_here, scaled.gather(1, target.unsqueeze(1)).squeeze(1), 0.0)
    total, chosen = reduce_from_tensor_model_parallel_region(torch.stack((total, chosen)), tp_group).unbind()
    # Without a set the sum is 0, whose logarithm would make the gradient of the branch not taken infinite.
    within = chosen - top - torch.where(kept.recorded, total, 1.0).log()
    return torch.where(kept.recorded, within, full)


def _ints(data: bytes) -> Tensor:
    if not data:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).long()


def _local(columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether a column is on this rank, and an index that is always valid."""
    here = (columns >= 0) & (columns < width)
    return here, columns.clamp(0, width - 1)
