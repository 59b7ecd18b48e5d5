"""Hugging Face weights into Megatron parameters and back, exactly; both directions follow `layout`.

A rank reads only the boxes it holds. On the way out, global rank 0 puts the tensors together one at a time from the
ranks that own their parts, so that it never holds more than the file it is writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from miles.trainer.architecture import Architecture
from miles.trainer.layout import ALONE, Piece, layout, owners, slices
from miles.trainer.parallel import Place
from miles.trainer.safetensors_folder import FolderReader, write_folder


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], arch: Architecture, place: Place, read: Callable[[Piece], Tensor]) -> None:
    """Fill the parameters of the rank at `place`; `read` gives the content of a piece's box. Padding rows become 0.

    Raises ValueError for parameters that are not those of `layout`.
    """
    table = layout(arch, place)
    if set(table) != set(parameters):
        raise ValueError(f"parameters without a place in the checkpoint: {sorted(set(table) ^ set(parameters))}")
    for name, pieces in table.items():
        parameters[name].zero_()
        for piece in pieces:
            parameters[name][slices(piece.local)].copy_(read(piece))


def load_hf(parameters: Mapping[str, Tensor], folder: Path, arch: Architecture, place: Place = ALONE) -> None:
    """Load this rank's part of a Hugging Face folder, converted to the parameters' dtype and device.

    Raises ConfigError when weights, or one of them, are missing or have another shape than the config says.
    """
    with FolderReader(folder) as reader:
        fill(parameters, arch, place, lambda piece: reader.read(piece.name, piece.global_shape, piece.box))


@torch.no_grad()
def global_tensors(
    parameters: Mapping[str, Tensor], arch: Architecture, place: Place = ALONE
) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: every (name, global tensor) in checkpoint order, on the CPU. On other ranks: nothing.

    A collective over all ranks: every one of them must run it to its end. Takes gradients as well as parameters.
    """
    for name, parts in owners(arch, place.sizes).items():
        boxes = []
        for owner, parameter, piece in parts:
            if place.rank not in (0, owner):
                continue
            if owner == place.rank:
                box = parameters[parameter].detach()[slices(piece.local)]
                if owner != 0:
                    torch.distributed.send(box.contiguous(), dst=0)
            else:
                # All parameters of a model have one dtype and device.
                like = next(iter(parameters.values()))
                box = like.new_empty([length for _, length in piece.box])
                torch.distributed.recv(box, src=owner)
            boxes.append((piece, box))
        if place.rank == 0:
            yield name, _assemble(boxes)


def export_hf(
    parameters: Mapping[str, Tensor], arch: Architecture, source: Path, target: Path, place: Place = ALONE
) -> None:
    """Write a Hugging Face folder, whole or absent, from rank 0; with config and tokenizer files of `source`.

    A collective over all ranks. Raises, on rank 0 only, ConfigError when `target` is not empty, and OSError.
    """
    tensors = global_tensors(parameters, arch, place)
    try:
        if place.rank == 0:
            write_folder(tensors, source, target)
    finally:
        # Also after an error: the others send regardless, and would wait for ever.
        for _ in tensors:
            pass


def _assemble(boxes: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    first, content = boxes[0]
    full = torch.empty(first.global_shape, dtype=content.dtype, device="cpu")
    for piece, box in boxes:
        full[slices(piece.box)] = box
    return full
