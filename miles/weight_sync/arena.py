"""The slots of one trainer rank: preregistered memory that versions are staged into, and the header that guards it.

Header, int64, always host memory: `[magic, incarnation, (begin, end, layout) * n_slots]`.
`begin` is written before the first byte of a version and `end` after its last, so a reader that finds both equal to
the version it wants, before and after its READ, has whole bytes (a seqlock). Lives in the rank's process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import torch

from miles.weight_sync import digest
from miles.weight_sync.messages import Layout, make_layout
from miles.weight_sync.ports import Shard

MAGIC = 0x4D494C4553  # "MILES"
HEADER_FIXED = 2
HEADER_PER_SLOT = 3


class LayoutChanged(ValueError):
    """The rank's shards are no longer those it was opened with."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def slot_views(memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The tensors of one flat uint8 slot, in the order of the layout's entries."""
    return [
        memory[entry.offset : entry.offset + entry.nbytes]
        .view(getattr(torch, entry.dtype))
        .view([length for _, length in entry.box])
        for entry in layout.entries
    ]


class SlotArena:
    """`n_slots` slots in one flat allocation on the shards' device, touched once so that no page fault is left."""

    def __init__(self, rank: int, shards: Iterable[Shard], n_slots: int) -> None:
        shards = list(shards)
        devices = {shard.tensor.device for shard in shards}
        if len(devices) != 1:
            raise ValueError(f"rank {rank} holds tensors on {sorted(map(str, devices))}; weight sync needs one device")
        self.device = devices.pop()
        self.layout = make_layout(
            rank,
            n_slots,
            (
                (
                    shard.name,
                    dtype_name(shard.tensor.dtype),
                    tuple(shard.global_shape),
                    tuple((int(start), int(length)) for start, length in shard.box),
                    shard.tensor.numel() * shard.tensor.element_size(),
                )
                for shard in shards
            ),
        )
        self.incarnation = secrets.randbits(62)
        self.memory = torch.empty(n_slots * self.layout.slot_bytes, dtype=torch.uint8, device=self.device).zero_()
        self.header = torch.zeros(HEADER_FIXED + HEADER_PER_SLOT * n_slots, dtype=torch.int64)
        self.header[0] = MAGIC
        self.header[1] = self.incarnation
        self._views = [slot_views(self.slot(index), self.layout) for index in range(n_slots)]

    def slot(self, index: int) -> torch.Tensor:
        """The flat uint8 memory of a slot."""
        size = self.layout.slot_bytes
        return self.memory[index * size : (index + 1) * size]

    def slot_address(self, index: int) -> int:
        """Its address."""
        return self.memory.data_ptr() + index * self.layout.slot_bytes

    def stage(self, index: int, version: int, shards: Iterable[Shard]) -> None:
        """Copy the live shards into a slot under `version`. Raises LayoutChanged before it has touched anything."""
        sources = self._sources(shards)
        at = HEADER_FIXED + HEADER_PER_SLOT * index
        self.header[at + 1] = 0
        self.header[at] = version  # before the first byte: a reader of the old version sees that it is gone
        with torch.no_grad():
            torch._foreach_copy_(self._views[index], sources)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies are queued; `end` must not be seen before them
        self.header[at + 2] = self.layout.crc
        self.header[at + 1] = version

    def sums(self, index: int, owned: Sequence[int]) -> dict[str, int]:
        """The partial digests of the owned entries of a slot, by tensor name."""
        views = self._views[index]
        entries = self.layout.entries
        return digest.add(
            {entry.name: digest.partial_sum(entry.name, views[i], entry.global_shape, entry.box)}
            for i, entry in ((i, entries[i]) for i in owned)
        )

    def version_in(self, index: int) -> int | None:
        """The version that lies whole in a slot, or None."""
        at = HEADER_FIXED + HEADER_PER_SLOT * index
        begin, end = int(self.header[at]), int(self.header[at + 1])
        return begin if begin == end and begin > 0 else None

    def _sources(self, shards: Iterable[Shard]) -> list[torch.Tensor]:
        sources: list[torch.Tensor] = []
        for entry, shard in zip(self.layout.entries, shards, strict=False):
            now = (shard.name, tuple(shard.box), dtype_name(shard.tensor.dtype))
            if now != (entry.name, entry.box, entry.dtype):
                raise LayoutChanged(f"rank {self.layout.rank} has {now} where it had {entry}")
            sources.append(shard.tensor)
        if len(sources) != len(self.layout.entries):
            raise LayoutChanged(f"rank {self.layout.rank} has {len(sources)} shards, not {len(self.layout.entries)}")
        return sources
