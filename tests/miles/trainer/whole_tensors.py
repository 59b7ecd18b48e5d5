"""Whole Hugging Face tensors into the parameters of ranks and back, without files or a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles.trainer.architecture import Architecture
from miles.trainer.layout import ALONE, global_shapes, owners, slices
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.weights import fill


def copy_in(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], arch: Architecture, place: Place = ALONE
) -> None:
    """Fill the parameters of the rank at `place`."""
    fill(parameters, arch, place, lambda piece: tensors[piece.name][slices(piece.box)])


def copy_out(ranks: Sequence[Mapping[str, Tensor]], arch: Architecture, sizes: ParallelSizes) -> dict[str, Tensor]:
    """Whole tensors from the parameters of all ranks, in rank order; NaN where no owner has a part."""
    found = {}
    for name, parts in owners(arch, sizes).items():
        found[name] = torch.full(global_shapes(arch)[name], float("nan"), dtype=torch.float64)
        for rank, parameter, piece in parts:
            found[name][slices(piece.box)] = ranks[rank][parameter][slices(piece.local)]
    return found
