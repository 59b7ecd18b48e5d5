"""The rank's tensors as boxes of the global Hugging Face tensors: live views, which is what weight sync reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from miles.trainer.layout import layout, slices
from miles.trainer.model import Architecture
from miles.trainer.protocol import TensorShard

if TYPE_CHECKING:
    from torch import Tensor


def iter_shards(
    parameters: Mapping[str, Tensor], arch: Architecture, rank: int = 0, size: int = 1
) -> Iterator[TensorShard]:
    """Every box that the parameters of TP rank `rank` hold, in a fixed order. Views share the parameters' memory."""
    for name, pieces in layout(arch, rank, size).items():
        tensor = parameters[name].detach()
        for piece in pieces:
            yield TensorShard(piece.name, piece.global_shape, piece.box, tensor[slices(piece.local)])
