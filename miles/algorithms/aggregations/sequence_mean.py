"""Mean over the tokens of each sequence, then over sequences: GRPO's and GSPO's."""

from __future__ import annotations

from collections.abc import Sequence


def sequence_mean(counts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[float]]:
    """1 / (S n), with S sequences that train a token and n trained tokens in the sequence.

    Sources: GRPO (arXiv 2402.03300), GSPO (arXiv 2507.18071).
    """
    sequences = sum(1 for group in counts for count in group if count)
    return [[1.0 / (sequences * count) if count else 0.0 for count in group] for group in counts]
