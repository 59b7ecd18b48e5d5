"""Hugging Face weights into Megatron parameters and back, exactly; both directions follow `layout`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from controllers.errors import ConfigError
from miles.trainer.folders import new_folder
from miles.trainer.layout import global_shapes, layout, slices
from miles.trainer.model import Architecture

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
MAX_FILE_BYTES = "5GB"


@torch.no_grad()
def copy_in(
    parameters: Mapping[str, Tensor], hf: Mapping[str, Tensor], arch: Architecture, rank: int = 0, size: int = 1
) -> None:
    """Fill the parameters of TP rank `rank` from global tensors. Padding rows become 0.

    Raises KeyError for a tensor that is missing, ValueError for one of another shape.
    """
    table = layout(arch, rank, size)
    if set(table) != set(parameters):
        raise ValueError(f"parameters without a place in the checkpoint: {sorted(set(table) ^ set(parameters))}")
    for name, pieces in table.items():
        parameters[name].zero_()
        for piece in pieces:
            source = hf[piece.name]
            if tuple(source.shape) != piece.global_shape:
                raise ValueError(f"{piece.name} has shape {tuple(source.shape)}, config says {piece.global_shape}")
            parameters[name][slices(piece.local)].copy_(source[slices(piece.box)])


@torch.no_grad()
def copy_out(ranks: list[Mapping[str, Tensor]], arch: Architecture) -> dict[str, Tensor]:
    """Global tensors from the parameters of all TP ranks, in rank order."""
    full: dict[str, Tensor] = {}
    for rank, parameters in enumerate(ranks):
        for name, pieces in layout(arch, rank, len(ranks)).items():
            local = parameters[name]
            for piece in pieces:
                if piece.name not in full:
                    full[piece.name] = local.new_empty(piece.global_shape)
                full[piece.name][slices(piece.box)] = local[slices(piece.local)]
    return full


def read_folder(folder: Path, arch: Architecture) -> dict[str, Tensor]:
    """The global tensors of a Hugging Face folder. Raises ConfigError when weights, or one of them, are missing."""
    if (folder / INDEX).is_file():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path {str(folder)!r} holds no safetensors weights", key="model.path")
    wanted = global_shapes(arch)
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(str(folder / file), framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys() if name in wanted})  # noqa: SIM118
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ConfigError(f"model.path {str(folder)!r} lacks {len(missing)} tensors, {missing[0]!r} among them")
    return found


def load_hf(model: Any, folder: Path, arch: Architecture, rank: int = 0, size: int = 1) -> None:
    """Load a Hugging Face folder into a model, converted to its dtype."""
    copy_in(dict(model.named_parameters()), read_folder(folder, arch), arch, rank, size)


def gather(model: Any, arch: Architecture, tp_group: Any = None) -> dict[str, Tensor]:
    """The global tensors of a model, copied; a collective over `tp_group` where it has more than one rank."""
    local = {name: parameter.detach() for name, parameter in model.named_parameters()}
    size = 1 if tp_group is None else tp_group.size()
    if size == 1:
        return copy_out([local], arch)
    ranks: list[Mapping[str, Tensor]] = [{} for _ in range(size)]
    for name, tensor in local.items():
        parts = [torch.empty_like(tensor) for _ in range(size)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=tp_group)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part  # type: ignore[index]
    return copy_out(ranks, arch)


def export_hf(tensors: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write tensors as a Hugging Face folder, with config and tokenizer files of `source`.

    Raises ConfigError when `target` exists and is not empty; it is whole or absent.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    with new_folder(target) as folder:
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(path, folder / path.name)
        config = json.loads((folder / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        plan = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=MAX_FILE_BYTES)
        for file, names in plan.filename_to_tensors.items():
            save_file({name: tensors[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
