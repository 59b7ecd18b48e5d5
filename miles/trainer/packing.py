"""Sequences of different lengths laid end to end in micro-batches under a token budget.

Sorted by length within one, so that attention sees few runs of equal length. Which micro-batch and which rank a
sequence lands in never changes the gradient: each trained token carries its weight in the sum over the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.trainer.attention import PackedRuns, pack_params
from miles.trainer.balance import balanced
from miles.trainer.context_parallel import own_tokens
from miles.trainer.kept_tokens import KeptRows, kept_rows
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.routing_replay import recorded_experts
from miles.trainer.sequences import TokenSequence

FILLER = TokenSequence([0], [0], weight=0.0)
"""What an empty micro-batch holds: the ranks' collectives need as many forward passes everywhere."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """t input tokens of several sequences; n of their positions predict a token that is trained.

    `indices` are the positions of its sequences in the list that was packed, in packed order; trained tokens follow
    that order too. t is padded, by a sequence of its own that nothing is read from. Under context parallelism t counts
    what this rank holds of the sequences, each padded at its end; what has n entries is that of whole sequences.
    """

    indices: tuple[int, ...]
    """Empty where the micro-batch only keeps the ranks in step: its one token has weight 0 and counts nowhere."""
    lengths: tuple[int, ...]
    """Input tokens of each sequence, without the padding."""
    input_ids: Tensor
    """[1, t]"""
    position_ids: Tensor
    """[1, t]"""
    packed: PackedRuns
    rows: Tensor
    """[n], or [held]: the position, among t, whose logits predict each trained token."""
    held: Tensor | None
    """The trained tokens, among n, that this context-parallel rank predicts; None: all of them."""
    targets: Tensor
    """[n]"""
    behaviour: Tensor
    """[n] logprobs; 0 where there are none."""
    advantages: Tensor
    """[n]"""
    weights: Tensor
    """[n]: what each token's loss is multiplied by."""
    staleness: Tensor
    """[n] int64: optimizer steps since the weights that sampled each token."""
    ages: tuple[int, ...]
    """The different values in `staleness`, known without asking the device."""
    sequence: Tensor
    """[n] int64: the position among `indices` of the sequence each token belongs to."""
    reference: Tensor | None
    """[n] logprobs of the reference model, where they were computed."""
    kept: KeptRows | None
    """The tokens that each trained one, of those held, was drawn from, where not from the whole vocabulary."""

    @property
    def is_filler(self) -> bool:
        """Whether it holds no sequence."""
        return not self.indices


def pack(
    sequences: Sequence[TokenSequence],
    token_budget: int,
    place: Place,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """The micro-batches of the rank at `place`, as many as every other rank has; none without sequences.

    `token_budget` counts input tokens of one rank. All ranks must pass the same sequences.
    """
    sizes = place.sizes
    lengths = [_padded(sequence.length, sizes) for sequence in sequences]
    plan = balanced(lengths, sizes.data, token_budget * sizes.context)
    return [micro_batch(sequences, indices, place, torch.device(device)) for indices in plan[place.data]]


def micro_batch(
    sequences: Sequence[TokenSequence], indices: Sequence[int], place: Place, device: torch.device
) -> MicroBatch:
    """The chosen sequences end to end, padded so that the ranks can share them."""
    chosen = [sequences[index] for index in indices] or [FILLER]
    lengths = tuple(sequence.length for sequence in chosen)
    runs = [_padded(length, place.sizes) for length in lengths]
    padding = -sum(runs) % _multiple(place.sizes)
    starts = [0, *accumulate(runs)][:-1]
    if padding:
        runs.append(padding)
    inputs = np.zeros(sum(runs), np.int64)
    rows = []
    for sequence, start in zip(chosen, starts, strict=True):
        prompt, response = len(sequence.prompt_ids), len(sequence.response_ids)
        inputs[start : start + prompt] = sequence.prompt_ids
        inputs[start + prompt : start + sequence.length] = sequence.response_ids[:-1]
        rows.append(_trained(sequence, np.arange(start + prompt - 1, start + prompt - 1 + response)))
    row = np.concatenate(rows)
    positions = np.concatenate([np.arange(length) for length in runs])
    routing = recorded_experts([sequence.routing for sequence in chosen], starts, len(inputs))
    kept = kept_rows(chosen, device)
    held: NDArray[np.int64] | None = None
    if place.sizes.context > 1:
        own = own_tokens(runs, place.sizes.context, place.context)
        inputs, positions = inputs[own], positions[own]
        routing = None if routing is None else routing[own]
        local = np.full(sum(runs), -1)
        local[own] = np.arange(len(own))
        held = np.flatnonzero(local[row] >= 0)
        row = local[row[held]]
        kept = None if kept is None else kept.of(torch.from_numpy(held).to(device))
    staleness = _joined(chosen, [one.staleness for one in chosen], np.int64)
    reference = [one.reference for one in chosen]
    counts = [one.trained for one in chosen]

    def tensor(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        indices=tuple(indices),
        lengths=lengths,
        input_ids=tensor(inputs)[None],
        position_ids=tensor(positions)[None],
        packed=pack_params(runs, device, routing),
        rows=tensor(row),
        held=None if held is None else tensor(held),
        targets=tensor(_joined(chosen, [one.response_ids for one in chosen], np.int64)),
        behaviour=tensor(_joined(chosen, [one.behaviour for one in chosen], np.float32)),
        advantages=tensor(_joined(chosen, [one.advantages for one in chosen], np.float32)),
        weights=tensor(np.repeat(np.array([one.weight for one in chosen], np.float32), counts)),
        staleness=tensor(staleness),
        ages=tuple(np.unique(staleness).tolist()),
        sequence=tensor(np.repeat(np.arange(len(chosen)), counts)),
        reference=tensor(_joined(chosen, reference, np.float32)) if any(reference) else None,
        kept=kept,
    )


def _padded(length: int, sizes: ParallelSizes) -> int:
    """Under context parallelism each rank holds two chunks of every sequence, all of one length."""
    return length + -length % (2 * sizes.context) if sizes.context > 1 else length


def _multiple(sizes: ParallelSizes) -> int:
    """What the number of tokens must be a multiple of, over the context-parallel ranks together."""
    shares = sizes.tensor if sizes.sequence else 1
    return sizes.context * math.lcm(2, shares) if sizes.context > 1 else shares


def _joined(chosen: Sequence[TokenSequence], values: Sequence[Sequence[Any] | None], dtype: Any) -> NDArray[Any]:
    """What belongs to trained tokens, end to end, of values that each response token has; 0 where there are none."""
    parts = [
        np.zeros(one.trained, dtype) if of_one is None else _trained(one, np.asarray(of_one, dtype))
        for one, of_one in zip(chosen, values, strict=True)
    ]
    return np.concatenate(parts)


def _trained(sequence: TokenSequence, values: NDArray[Any]) -> NDArray[Any]:
    return values if sequence.mask is None else values[np.asarray(sequence.mask, bool)]
