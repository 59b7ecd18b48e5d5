"""Context parallelism: ranks share the tokens of every sequence, and attention sees the whole of it.

Each packed sequence is padded to 2 x ranks chunks of one length; rank r holds chunks r and 2 x ranks - 1 - r, so that
causal attention costs every rank the same (Megatron-core's layout, after zigzag ring attention). Attention gathers
keys and values of all ranks (as Llama 3 does, arXiv 2407.21783); backward, their gradients are summed to their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

Runs = Sequence[tuple[int, int]]
"""Of packed sequences, the padding included: how many of one length follow one another, and that length."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [b, s, heads, d], keys and values [b, k, groups, d] -> [b, s, heads, d]: query i sees k - s + i + 1 keys."""


def own_tokens(lengths: Sequence[int], ranks: int, rank: int) -> list[int]:
    """Where the tokens that `rank` holds stand among all packed tokens, in its order. Lengths are padded ones."""
    held: list[int] = []
    start = 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            held.extend(range(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return held


def attend_own_chunks(query: Tensor, key: Tensor, value: Tensor, runs: Runs, group: Any, attend: Attend) -> Tensor:
    """Causal attention of this rank's tokens to the whole of their sequences.

    `query` is [t / ranks, heads, d], `key` and `value` [t / ranks, groups, d] -> [t / ranks, heads, d].
    """
    ranks, rank = group.size(), group.rank()
    # One collective a layer, and one for the gradients.
    both = torch.stack((key, value), 1)
    gathered: Tensor = gather_from_sequence_parallel_region(both, group=group).view(ranks, *both.shape)
    pieces, start = [], 0
    for count, length in runs:
        chunk = length // (2 * ranks)
        end = start + count * 2 * chunk
        whole = _in_order(gathered[:, start:end].reshape(ranks, count, 2, chunk, *both.shape[1:]))
        queries = query[start:end].reshape(count, 2, chunk, *query.shape[1:])
        halves = []
        for half, index in enumerate((rank, 2 * ranks - 1 - rank)):
            keys, values = whole[:, : (index + 1) * chunk].unbind(2)
            halves.append(attend(queries[:, half], keys, values))
        pieces.append(torch.stack(halves, 1).flatten(0, 2))
        start = end
    return torch.cat(pieces)


def _in_order(gathered: Tensor) -> Tensor:
    """[ranks, sequences, 2, chunk, ...] -> [sequences, 2 * ranks * chunk, ...], the tokens of each in order."""
    first, second = gathered.unbind(2)
    return torch.cat((first, second.flip(0))).transpose(0, 1).flatten(1, 2)


def spread(values: Tensor, held: Tensor, count: int, group: Any) -> Tensor:
    """[count, ...] on all ranks, each holding `values` of the tokens `held`. Every token is held by one rank.

    All ranks go on to the same loss, and each token's gradient comes back to the rank that holds it, once.
    """
    whole: Tensor = values.new_zeros((count, *values.shape[1:])).index_copy(0, held, values)
    spread_out: Tensor = reduce_from_tensor_model_parallel_region(whole, group)
    return spread_out
