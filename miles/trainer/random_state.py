"""The random generators of a rank: torch's, CUDA's, Python's, numpy's, and Megatron's tracker where it is in use.

A checkpoint holds every rank's. Restored into the same parallel sizes, each rank goes on with its own. After a change
of sizes, rank n is no longer the rank that drew, so all go on with rank 0's, as ranks start out with one seed, and
the tracker, whose streams differ between tensor-parallel ranks, stays as it was seeded at the start.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import random as megatron_random

KEY = "rng"


def captured(rank: int, world_size: int) -> ShardedObject:
    """This rank's generators, as a checkpoint's part."""
    return ShardedObject(KEY, _state(), (world_size,), (rank,), replica_id=0)


def wanted(rank: int, saved_world_size: int) -> ShardedObject:
    """The place in a checkpoint of `saved_world_size` ranks where rank `rank`'s generators lie."""
    return ShardedObject(KEY, None, (saved_world_size,), (rank,), replica_id=0)


def restore(state: dict[str, Any], *, own: bool) -> None:
    """Go on with generators from a checkpoint: this rank's `own`, or rank 0's of other parallel sizes."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    if own and state["tracker"]:
        megatron_random.get_cuda_rng_tracker().set_states(state["tracker"])


def _state() -> dict[str, Any]:
    tracker = megatron_random.get_cuda_rng_tracker()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tracker": tracker.get_states() if tracker.is_initialized() else {},
    }
