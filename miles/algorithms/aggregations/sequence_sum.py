"""Sum over the tokens of each sequence, divided by a constant: Dr. GRPO's, free of a bias by length."""

from __future__ import annotations

from collections.abc import Sequence


def sequence_sum(counts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[float]]:
    """1 / (S M), with S sequences that train a token and M = `max_tokens`, the longest response there may be.

    Source: Dr. GRPO (arXiv 2503.20783).
    """
    sequences = sum(1 for group in counts for count in group if count)
    return [[1.0 / (sequences * max_tokens) if count else 0.0 for count in group] for group in counts]
