"""Where each global (Hugging Face) tensor lives in an engine's model: views of its live, possibly fused parameters.

Fused names are SGLang's: `qkv_proj` holds the rows of q, k and v, `gate_up_proj` those of gate and up. Every element
of every parameter must be covered, or an engine would go on serving what it was made with. One tensor-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from miles.weight_sync.arena import dtype_name
from miles.weight_sync.messages import Layout

_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")


class UnboundTensor(ValueError):
    """A tensor or a parameter has no counterpart; the message names it."""


def bind(model: torch.nn.Module, layout: Layout) -> list[torch.Tensor]:
    """The live view of each entry of `layout`, in order; contiguous rows of a parameter.

    Raises UnboundTensor for a tensor the model lacks, a shape or dtype that differs, or a parameter not covered.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {entry.name: entry.global_shape for entry in layout.entries}
    covered: dict[int, int] = {}
    views: list[torch.Tensor] = []
    for entry in layout.entries:
        owner, view = _view(entry.name, entry.global_shape, parameters, shapes)
        if tuple(view.shape) != entry.global_shape or dtype_name(view.dtype) != entry.dtype:
            raise UnboundTensor(
                f"{entry.name} is {entry.dtype}{list(entry.global_shape)}, "
                f"the engine has {dtype_name(view.dtype)}{list(view.shape)}"
            )
        covered[owner.data_ptr()] = covered.get(owner.data_ptr(), 0) + view.numel()
        views.append(view)
    bare = [name for name, parameter in parameters.items() if covered.get(parameter.data_ptr(), 0) < parameter.numel()]
    if bare:
        raise UnboundTensor(f"no weights are published for {', '.join(bare[:5])} of the engine")
    return views


def _view(
    name: str,
    shape: tuple[int, ...],
    parameters: Mapping[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the parameter that holds the tensor, the view of it there)."""
    if name in parameters:
        data = parameters[name].data
        return data, data
    match = _PART.search(name)
    if match is not None:
        fused, index = _FUSED[match[1]]
        holder = parameters.get(name.replace(match[1], fused))
        if holder is not None:
            siblings = [name.replace(match[1], part) for part in _PARTS[fused]]
            missing = [sibling for sibling in siblings if sibling not in shapes]
            if missing:
                raise UnboundTensor(f"{missing[0]} is not published, though {name} is")
            rows = [shapes[sibling][0] for sibling in siblings]
            if sum(rows) != holder.shape[0]:
                raise UnboundTensor(f"{name}: the engine's {fused} has {holder.shape[0]} rows, not {rows} together")
            start = sum(rows[:index])
            return holder.data, holder.data[start : start + shape[0]]
    if name == "lm_head.weight" and "model.embed_tokens.weight" in parameters:
        data = parameters["model.embed_tokens.weight"].data  # tied: published under both names, with equal bytes
        return data, data
    raise UnboundTensor(f"the engine's model has no parameter for {name}")
