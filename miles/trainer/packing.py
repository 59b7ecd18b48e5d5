"""Sequences of different lengths laid end to end in micro-batches under a token budget.

Sorted by length within one, so that attention sees few runs of equal length. Which micro-batch and which rank a
sequence lands in never changes the gradient: each trained token carries its weight in the sum over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TypeVar

import torch
from torch import Tensor

from miles.trainer.attention import PackedRuns, pack_params
from miles.trainer.balance import balanced
from miles.trainer.kept_tokens import KeptRows, kept_rows
from miles.trainer.parallel import Place
from miles.trainer.routing_replay import recorded_experts
from miles.trainer.sequences import TokenSequence

T = TypeVar("T")

FILLER = TokenSequence([0], [0], weight=0.0)
"""What an empty micro-batch holds: the ranks' collectives need as many forward passes everywhere."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """t input tokens of several sequences; n of their positions predict a token that is trained.

    `indices` are the positions of its sequences in the list that was packed, in packed order; trained tokens follow
    that order too. t is padded, by a sequence of its own that nothing is read from.
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
    """[n]: the position, among t, whose logits predict each trained token."""
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
    """The tokens that each trained one was drawn from, where not from the whole vocabulary."""

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

    `token_budget` counts input tokens. All ranks must pass the same sequences.
    """
    plan = balanced([sequence.length for sequence in sequences], place.sizes.data, token_budget)
    multiple = place.sizes.tensor if place.sizes.sequence else 1
    return [micro_batch(sequences, indices, multiple, torch.device(device)) for indices in plan[place.data]]


def micro_batch(
    sequences: Sequence[TokenSequence], indices: Sequence[int], multiple: int, device: torch.device
) -> MicroBatch:
    """The chosen sequences end to end, padded to a multiple of so many tokens."""
    chosen = [sequences[index] for index in indices] or [FILLER]
    inputs: list[int] = []
    rows: list[int] = []
    for sequence in chosen:
        first = len(inputs) + len(sequence.prompt_ids) - 1
        rows.extend(compress(range(first, first + len(sequence.response_ids)), _mask(sequence)))
        inputs.extend(sequence.prompt_ids)
        inputs.extend(sequence.response_ids[:-1])
    lengths = tuple(sequence.length for sequence in chosen)
    padding = -len(inputs) % multiple
    runs = [*lengths, padding] if padding else list(lengths)
    positions = [position for length in runs for position in range(length)]
    staleness = [age for one in chosen for age in _trained(one, one.staleness or _zeros(one))]
    reference = [value for one in chosen for value in _trained(one, one.reference or ())]

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        indices=tuple(indices),
        lengths=lengths,
        input_ids=integers(inputs + [0] * padding)[None],
        position_ids=integers(positions)[None],
        packed=_packed(chosen, runs, len(positions), device),
        rows=integers(rows),
        targets=integers([token for one in chosen for token in _trained(one, one.response_ids)]),
        behaviour=numbers([value for one in chosen for value in _trained(one, one.behaviour or _zeros(one))]),
        advantages=numbers([value for one in chosen for value in _trained(one, one.advantages or _zeros(one))]),
        weights=numbers([one.weight for one in chosen for _ in range(one.trained)]),
        staleness=integers(staleness),
        ages=tuple(sorted(set(staleness))),
        sequence=integers([position for position, one in enumerate(chosen) for _ in range(one.trained)]),
        reference=numbers(reference) if reference else None,
        kept=kept_rows(chosen, device),
    )


def _packed(sequences: Sequence[TokenSequence], runs: list[int], tokens: int, device: torch.device) -> PackedRuns:
    packed = pack_params(runs, device)
    starts = [0, *accumulate(sequence.length for sequence in sequences)][:-1]
    routing = recorded_experts([sequence.routing for sequence in sequences], starts, tokens)
    packed.routing = None if routing is None else routing.to(device)
    return packed


def _zeros(sequence: TokenSequence) -> Sequence[int]:
    return [0] * len(sequence.response_ids)


def _mask(sequence: TokenSequence) -> Sequence[bool]:
    return sequence.mask if sequence.mask is not None else [True] * len(sequence.response_ids)


def _trained(sequence: TokenSequence, values: Sequence[T]) -> Sequence[T]:
    """What belongs to trained tokens, of values that each response token has."""
    return values if sequence.mask is None else list(compress(values, sequence.mask))
