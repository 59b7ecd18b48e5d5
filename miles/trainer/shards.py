"""The rank's tensors as boxes of the global Hugging Face tensors: live views, which is what weight sync reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from miles.trainer.architecture import Architecture
from miles.trainer.layout import ALONE, layout, slices
from miles.trainer.parallel import Place
from miles.trainer.protocol import TensorShard

if TYPE_CHECKING:
    from torch import Tensor


def iter_shards(parameters: Mapping[str, Tensor], arch: Architecture, place: Place = ALONE) -> Iterator[TensorShard]:
    """Every box that the parameters of the rank at `place` hold, in a fixed order. Views share their memory."""
    for name, pieces in layout(arch, place).items():
        tensor = parameters[name].detach()
        for piece in pieces:
            yield TensorShard(piece.name, piece.global_shape, piece.box, tensor[slices(piece.local)])
