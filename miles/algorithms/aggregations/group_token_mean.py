"""Mean over the tokens of each group, then over groups: DAPO to the letter."""

from __future__ import annotations

from collections.abc import Sequence


def group_token_mean(counts: Sequence[Sequence[int]], *, max_tokens: int) -> list[list[float]]:
    """1 / (G N_g), with G groups that train a token and N_g trained tokens in the group.

    Source: equation 8 of DAPO (arXiv 2503.14476).
    """
    groups = sum(1 for group in counts if sum(group))
    return [[1.0 / (groups * sum(group)) if count else 0.0 for count in group] for group in counts]
