"""Staging memory of one engine rank: where a version is brought and verified before any live parameter changes.

Allocated and touched once. A READ that timed out may still write later, so its staging is never used again: `replace`
gives fresh memory, and whoever posted the READ keeps the old one alive. Belongs to the agent's thread.
"""

from __future__ import annotations

import torch

from miles.weight_sync import digest
from miles.weight_sync.arena import slot_views
from miles.weight_sync.messages import Layout
from miles.weight_sync.plan import tensors_of


class Staging:
    """Flat memory for every global tensor whole, on the engine's device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._tensors = tensors_of([layout])
        self.flat = self._allocate()
        self.views = slot_views(self.flat, layout)

    def replace(self) -> None:
        """Go on with fresh memory; the old one belongs to whoever still holds it."""
        self.flat = self._allocate()
        self.views = slot_views(self.flat, self.layout)

    def digest(self) -> str:
        """The digest of what lies in staging now."""
        return self.digest_of(self.views)

    def digest_of(self, tensors: list[torch.Tensor]) -> str:
        """The digest of `tensors`, one for each entry of the layout."""
        return digest.combine(
            {
                entry.name: digest.partial_sum(entry.name, tensor, entry.global_shape, entry.box)
                for entry, tensor in zip(self.layout.entries, tensors, strict=True)
            },
            self._tensors,
        )

    def _allocate(self) -> torch.Tensor:
        return torch.empty(self.layout.slot_bytes, dtype=torch.uint8, device=self.device).zero_()
