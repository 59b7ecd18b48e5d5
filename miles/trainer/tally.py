"""Token metrics of a step: sums and maxima over its micro-batches, then over all ranks, exact however it was cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from miles.trainer.parallel import Place


class Tally:
    """Adds up on the device; waits for it once, in `totals`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add the values of some tokens, [n]."""
        total = values.detach().double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def raise_to(self, name: str, values: Tensor) -> None:
        """Take the largest of some tokens' values, [n] or a scalar, into a maximum."""
        largest = values.detach().double().amax()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def totals(self, place: Place) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all ranks, the same on each; one collective. Names may differ between ranks.

        Of the last stage one tensor- and context-parallel rank counts: its fellows saw the same tokens.
        """
        counts = place.tensor == 0 and place.context == 0 and place.is_last_stage
        own = (_floats(self._sums), _floats(self._maxima)) if counts else ({}, {})
        every = [own]
        if place.sizes.world_size > 1:
            every = [own for _ in range(place.sizes.world_size)]
            torch.distributed.all_gather_object(every, own)
        sums = _merged((part for part, _ in every), _total)
        return sums, _merged((part for _, part in every), _largest)


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    if not values:
        return {}
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _merged(parts: Iterable[dict[str, float]], combine: Callable[[list[float]], float]) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            gathered.setdefault(name, []).append(value)
    return {name: combine(values) for name, values in gathered.items()}


def _total(values: list[float]) -> float:
    """Exact, or no finite number where `fsum` would raise: a step that exploded is to be skipped and counted."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)
