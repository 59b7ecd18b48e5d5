"""Sequences of different lengths laid end to end in micro-batches under a token budget.

Sorted by length, so that attention sees few runs of equal length; which micro-batch a sequence lands in never changes
the gradient, because losses are summed and divided by the token count of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.trainer.attention import PackedRuns, pack_params
from miles.trainer.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """t input tokens of several sequences; n of their positions predict a response token.

    `indices` are the positions of its sequences in the list that was packed, in packed order; response tokens follow
    that order too.
    """

    indices: tuple[int, ...]
    input_ids: Tensor
    """[1, t]"""
    position_ids: Tensor
    """[1, t]"""
    packed: PackedRuns
    rows: Tensor
    """[n]: the position, among t, whose logits predict each response token."""
    targets: Tensor
    """[n]"""
    behaviour: Tensor
    """[n] logprobs; 0 where there are none."""
    advantages: Tensor
    """[n]"""
    sequence: Tensor
    """[n]: the position among `indices` of the sequence each token belongs to."""


def pack(
    sequences: Sequence[TokenSequence], token_budget: int, device: torch.device | str = "cpu"
) -> Iterator[MicroBatch]:
    """Cut sequences into micro-batches of at most `token_budget` input tokens, or of one longer sequence."""
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].length, i))
    taken: list[int] = []
    tokens = 0
    for index in order:
        length = sequences[index].length
        if taken and tokens + length > token_budget:
            yield _micro_batch(sequences, taken, torch.device(device))
            taken, tokens = [], 0
        taken.append(index)
        tokens += length
    if taken:
        yield _micro_batch(sequences, taken, torch.device(device))


def _micro_batch(sequences: Sequence[TokenSequence], indices: list[int], device: torch.device) -> MicroBatch:
    inputs: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    owners: list[int] = []
    for position, index in enumerate(indices):
        sequence = sequences[index]
        start, count = len(inputs), len(sequence.response_ids)
        inputs.extend(sequence.prompt_ids)
        inputs.extend(sequence.response_ids[:-1])
        positions.extend(range(sequence.length))
        first = start + len(sequence.prompt_ids) - 1
        rows.extend(range(first, first + count))
        targets.extend(sequence.response_ids)
        owners.extend([position] * count)
        behaviour.extend(sequence.behaviour or [0.0] * count)
        advantages.extend(sequence.advantages or [0.0] * count)
    return MicroBatch(
        indices=tuple(indices),
        input_ids=torch.tensor([inputs], device=device),
        position_ids=torch.tensor([positions], device=device),
        packed=pack_params([sequences[index].length for index in indices], device),
        rows=torch.tensor(rows, device=device),
        targets=torch.tensor(targets, device=device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        sequence=torch.tensor(owners, device=device),
    )
