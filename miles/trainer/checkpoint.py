"""Checkpoints of a rank group in Megatron's distributed format: weights, optimizer, counters, RNG.

A folder is whole or absent: ranks write beside it, rank 0 renames. Saving over an older checkpoint replaces it;
anything else that is in the way is refused. Which checkpoints to keep is the caller's business.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from controllers.errors import ConfigError
from miles.trainer.cpu_compat import checkpoint_save_on_cpu
from miles.trainer.folders import publish, refuse_occupied, temporary_beside

MARKER = "metadata.json"


@dataclass(frozen=True, slots=True)
class Counters:
    """Steps done. The learning rate follows from `steps` alone."""

    steps: int = 0
    warmup_steps: int = 0
    skipped_steps: int = 0


def save(folder: Path, model: Any, optimizer: Any, counters: Counters) -> None:
    """Write a checkpoint; a collective over all ranks. Raises ConfigError when something else lies at `folder`."""
    replaces = (folder / MARKER).is_file()
    if not replaces:
        refuse_occupied(folder)
    rank = torch.distributed.get_rank()
    names: list[Any] = [str(temporary_beside(folder))]
    torch.distributed.broadcast_object_list(names, src=0)
    temporary = Path(names[0])
    if rank == 0:
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    try:
        state = _sharded_state(model, optimizer)
        state["counters"] = asdict(counters)
        state["rng"].data = _rng_state()
        with checkpoint_save_on_cpu():
            dist_checkpointing.save(state, str(temporary))
        if rank == 0:
            _put_in_place(temporary, folder, replaces)
        torch.distributed.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path, model: Any, optimizer: Any) -> Counters:
    """Restore weights, optimizer and RNG in place and return the counters. Raises ConfigError without a checkpoint."""
    if not (folder / MARKER).is_file():
        raise ConfigError(f"{str(folder)!r} is not a checkpoint: it has no {MARKER}")
    loaded = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    _restore_rng(loaded["rng"])
    return Counters(**loaded["counters"])


def _sharded_state(model: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    tensors = model.sharded_state_dict()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {
        "model": tensors,
        "optimizer": optimizer.sharded_state_dict(tensors, is_loading=is_loading),
        "rng": ShardedObject("rng", None, (size,), (rank,), replica_id=0),
    }


def _put_in_place(temporary: Path, folder: Path, replaces: bool) -> None:
    old = temporary_beside(folder)
    if replaces:
        folder.rename(old)
    publish(temporary, folder)
    if replaces:
        shutil.rmtree(old)


def _rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
