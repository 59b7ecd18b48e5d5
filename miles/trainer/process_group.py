"""torch.distributed and Megatron's parallel state for one rank that trains alone."""

from __future__ import annotations

import os

import torch
from megatron.core import parallel_state


def join_alone(*, threads: int = 1) -> None:
    """A gloo group of one, without a rendezvous port. Repeated calls are harmless."""
    torch.set_num_threads(threads)
    if not torch.distributed.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)


def leave() -> None:
    """Undo `join_alone`."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
