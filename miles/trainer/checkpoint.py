"""What a checkpoint of a rank group holds, in Megatron's distributed format, and how it comes back.

Weights, the optimizer's moments and step, the counters that the schedule follows from, the reference's weights and
every rank's random generators. Ranks of any parallel sizes load it, each its own part of the global tensors; only the
random generators depend on the sizes (see random_state). CheckpointWriter puts it on disk.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from controllers.errors import CheckpointFailed, ConfigError
from miles.trainer import random_state

MARKER, COMMON = "metadata.json", "common.pt"
FORMAT = "miles.checkpoint.1"

Reference = Mapping[str, Tensor]
"""Parameter name -> a tensor of that parameter's shape."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Steps done. The learning rate follows from `steps` alone."""

    steps: int = 0
    warmup_steps: int = 0
    skipped_steps: int = 0


def state_to_save(model: Any, optimizer: Any, counters: Counters, reference: Reference | None = None) -> dict[str, Any]:
    """The sharded state of this rank, over live tensors: hand it to CheckpointWriter.begin at once.

    `model` is the GPTModel itself, without the wrapper that reduces gradients.
    """
    weights = model.sharded_state_dict()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    state = {
        "format": FORMAT,
        "counters": asdict(counters),
        "sizes": _sizes(),
        "has_reference": reference is not None,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=False),
        random_state.KEY: random_state.captured(rank, size),
    }
    if reference is not None:
        state["reference"] = _sharded_reference(model, weights, reference)
    return state


def load(folder: Path, model: Any, optimizer: Any, reference: Reference | None = None) -> Counters:
    """Restore everything in place and return the counters; a collective over all ranks.

    Raises ConfigError for a folder that holds no checkpoint, or one without the weights of a reference asked for,
    CheckpointFailed for one that cannot be read.
    """
    common = _common_state(folder)
    if reference is not None and not common["has_reference"]:
        raise ConfigError(f"{str(folder)!r} holds no reference weights: it was saved by a run without a reference")
    weights = model.sharded_state_dict()
    wanted = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True)}
    if reference is not None:
        wanted["reference"] = _sharded_reference(model, weights, reference)
    loaded = _read(wanted, folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for name, tensor in (reference or {}).items():
        tensor.copy_(loaded["reference"][name])
    _load_random_state(folder, common["sizes"])
    return Counters(**common["counters"])


def load_weights(folder: Path, model: Any) -> None:
    """Restore the weights alone, in place: the schedule begins anew. Raises what `load` raises."""
    _common_state(folder)
    model.load_state_dict(_read({"model": model.sharded_state_dict()}, folder)["model"])


def _common_state(folder: Path) -> dict[str, Any]:
    if not (folder / MARKER).is_file():
        raise ConfigError(f"{str(folder)!r} is not a checkpoint: it has no {MARKER}")
    if not (folder / COMMON).is_file():
        # Megatron would trip over its own message for this.
        raise CheckpointFailed(f"{str(folder)!r} cannot be read: it has no {COMMON}", folder=str(folder))
    common = _read({}, folder)
    if common.get("format") != FORMAT:
        raise ConfigError(f"{str(folder)!r} has the format {common.get('format')!r}; this version reads {FORMAT!r}")
    return common


def _read(wanted: dict[str, Any], folder: Path, *, whole: bool = True) -> dict[str, Any]:
    """What lies in the checkpoint of a sharded state, and its common part; a collective. `whole`: ranks read it all."""
    try:
        if not wanted:
            return dict(dist_checkpointing.load_common_state_dict(str(folder)))
        return dict(dist_checkpointing.load(wanted, str(folder), validate_access_integrity=whole))
    except (CheckpointingException, CheckpointException, OSError, EOFError, pickle.UnpicklingError) as error:
        # Torch's own says only which ranks failed; what happened there is inside.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        raise CheckpointFailed(f"{str(folder)!r} cannot be read: {reason}", folder=str(folder)) from error


def _sharded_reference(model: Any, weights: Any, reference: Reference) -> dict[str, Any]:
    """The reference cut as the model is: each tensor takes the place of its parameter in the model's sharded state."""
    places = {id(part.data): part for part in nested_values(weights) if hasattr(part, "data")}
    return {
        name: make_sharded_optimizer_tensor(places[id(parameter)], reference[name], prefix="reference")
        for name, parameter in model.named_parameters()
    }


def _sizes() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


def _load_random_state(folder: Path, saved: dict[str, int]) -> None:
    own = saved == _sizes()
    saved_ranks = saved["tensor"] * saved["pipeline"] * saved["context"] * saved["data"]
    part = random_state.wanted(torch.distributed.get_rank() if own else 0, saved_ranks)
    # Not with the rest: Megatron checks that ranks together read all of an object, and here it may be rank 0's only.
    loaded = _read({random_state.KEY: part}, folder, whole=False)
    random_state.restore(loaded[random_state.KEY], own=own)
