"""What the processes of `tests.support.ranks` import before they are forked, and what each does first."""

from __future__ import annotations

import warnings
from typing import Any

from miles.trainer.cpu_compat import import_megatron

import_megatron()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from transformers import AutoConfig  # noqa: E402, F401 - lazily imported otherwise, by every rank anew

from miles.trainer import learner, process_group  # noqa: E402, F401
from miles.trainer.parallel import ParallelSizes  # noqa: E402

TIMEOUT_S = 60.0
"""Of one collective."""

_divided: list[ParallelSizes] = []


def quiet() -> None:
    """Warnings are for the test's own process to judge."""
    warnings.simplefilter("ignore")


def host() -> tuple[Any, str]:
    """The store of rank 0 and its address."""
    return process_group.host_rendezvous(TIMEOUT_S, process_group.LOOPBACK)


def meet(rank: int, count: int, store: Any, rendezvous: str) -> None:
    """Join the group, as data-parallel ranks until told otherwise."""
    torch.set_num_threads(1)
    sizes = ParallelSizes(data=count)
    store = store or process_group.connect_rendezvous(rendezvous, TIMEOUT_S)
    process_group.join(rank, sizes, store, rendezvous, join_timeout_s=TIMEOUT_S, call_timeout_s=TIMEOUT_S)
    _divided.append(sizes)


def leave() -> None:
    """Undo `join`."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def divide_anew(sizes: ParallelSizes) -> None:
    """Cut Megatron's groups by other sizes."""
    if _divided[-1] != sizes:
        parallel_state.destroy_model_parallel()
        process_group.divide(sizes, TIMEOUT_S)
        _divided.append(sizes)
