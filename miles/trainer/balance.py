"""Which sequence goes to which micro-batch of which data-parallel rank. Torch-free.

A pure function of the lengths: every rank works it out for itself and all agree. Every rank gets the same number of
micro-batches, as collectives inside a layer or between pipeline stages need; some may be empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Plan = tuple[tuple[tuple[int, ...], ...], ...]
"""[rank][micro-batch] -> indices into the lengths, shortest first."""


def balanced(lengths: Sequence[int], ranks: int, token_budget: int) -> Plan:
    """Few micro-batches of at most `token_budget` tokens (or of one longer sequence), with loads as even as may be.

    Longest sequence first, each to the micro-batch with the fewest tokens (LPT, Graham 1969). The n-th micro-batches
    of all ranks are near in size, and a rank that got more so far gets the smaller one. Empty without lengths.
    """
    if not lengths:
        return ((),) * ranks
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rounds = -(-sum(min(length, token_budget) for length in lengths) // (token_budget * ranks))
    while True:
        bins = _spread(longest_first, lengths, rounds * ranks, token_budget)
        if bins is not None:
            return _deal(bins, lengths, ranks)
        rounds += max(1, rounds // 32)


def _spread(order: Sequence[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """`count` bins of indices; None where one of several sequences would hold more than `budget`."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for sequence in order:
        load, index = loads[0]
        if load and load + lengths[sequence] > budget:
            return None
        bins[index].append(sequence)
        heapq.heapreplace(loads, (load + lengths[sequence], index))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> Plan:
    loads = [sum(lengths[index] for index in indices) for indices in bins]
    largest_first = sorted(range(len(bins)), key=lambda index: (-loads[index], index))
    totals = [0] * ranks
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, taken in zip(lightest_first, largest_first[start : start + ranks], strict=True):
            totals[rank] += loads[taken]
            dealt[rank].append(tuple(sorted(bins[taken], key=lambda index: (lengths[index], index))))
    return tuple(tuple(micro_batches) for micro_batches in dealt)
