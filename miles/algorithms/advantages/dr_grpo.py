"""Dr. GRPO: GRPO without the division that favours groups of nearly equal rewards."""

from __future__ import annotations

from collections.abc import Sequence

from miles.algorithms.advantages.grpo import grpo
from miles.algorithms.advantages.sample import Sample


def dr_grpo(groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
    """R - mean over the group. Its other half is `aggregation: sequence_sum`. Source: arXiv 2503.20783."""
    return grpo(groups, scale_by_std=False)
