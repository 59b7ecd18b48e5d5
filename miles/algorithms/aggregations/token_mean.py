"""Mean over tokens: each trained token of the batch counts the same (DAPO as it is commonly run)."""

from __future__ import annotations

from collections.abc import Sequence


def token_mean(counts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[float]]:
    """1 / N, with N trained tokens in the batch. Long sequences weigh more. Source: DAPO (arXiv 2503.14476)."""
    total = sum(map(sum, counts)) or 1
    return [[1.0 / total for _ in group] for group in counts]
