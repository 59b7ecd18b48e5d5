"""Log-probabilities of given tokens over all ranks, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state

from miles.trainer.forward_backward import forward_only
from miles.trainer.heads import LogprobHead, TokenLogprobs
from miles.trainer.packing import MicroBatch
from miles.trainer.sequences import TokenSequence


def score(
    model: Any, sequences: Sequence[TokenSequence], micros: Sequence[MicroBatch], logprobs: TokenLogprobs
) -> list[list[float]]:
    """Of each trained token, by sequence; the same on every rank. A collective over all ranks.

    `model` is wrapped; `micros` are this rank's micro-batches of the `sequences`.
    """
    head = LogprobHead(logprobs)
    forward_only(model, micros, head)
    starts = [0, *accumulate(sequence.trained for sequence in sequences)]
    # Each token is found by one data-parallel rank of the last stage: all others add 0.
    values = torch.zeros(starts[-1], device=next(model.parameters()).device)
    for micro, found in head.found:
        own = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in micro.indices])
        values[own.to(values.device)] = found
    for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        if group.size() > 1 and len(values):
            torch.distributed.all_reduce(values, group=group)
    flat = values.tolist()
    return [flat[start:end] for start, end in pairwise(starts)]
