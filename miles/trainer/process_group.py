"""torch.distributed and Megatron's parallel state of one rank: meeting the others, and leaving them.

Rank 0 hosts a store (`host_rendezvous`) whose address the driver hands to all ranks; each then calls `join`. A rank
that trains alone needs no port. Gloo on CPU, NCCL on GPUs, over the network interface that reaches rank 0.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
import torch
from megatron.core import parallel_state
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from controllers.errors import WaitTimeout
from miles.trainer.parallel import ONE_RANK, ParallelSizes, Place

LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of documentation (RFC 5737): asking for the route to it sends nothing."""
_NOBODY_TO_WAIT_FOR_S = 60.0
"""Torch wants a deadline also for a group of one, which never waits."""


def host_rendezvous(timeout_s: float, host: str | None = None) -> tuple[Any, str]:
    """A store for rank 0 to keep and the `host:port` at which the others find it.

    `host` is an address of this machine that all ranks can reach; None takes that of its route to other machines, or
    the loopback where it has none. Listens there only.
    """
    address = host or _own_address(*_ELSEWHERE)
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{address}:{port}"


def connect_rendezvous(rendezvous: str, timeout_s: float) -> Any:
    """The store of rank 0 as another rank reaches it. Raises WaitTimeout where nobody answers at `host:port`."""
    host, _, port = rendezvous.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except distributed.DistError as error:
        raise WaitTimeout(
            f"no trainer rank 0 at {rendezvous} within {timeout_s:g} s: {error}",
            waited_for=rendezvous,
            timeout_s=timeout_s,
        ) from error


def join(
    rank: int,
    sizes: ParallelSizes,
    store: Any,
    rendezvous: str,
    *,
    device: str = "cpu",
    join_timeout_s: float,
    call_timeout_s: float,
) -> Place:
    """Meet all other ranks and make Megatron's groups; the place of this rank.

    Raises WaitTimeout, naming the ranks that did not come within `join_timeout_s`. A collective that takes longer
    than `call_timeout_s` fails on every rank. On `cuda` a rank takes the first GPU that it can see.
    """
    _await_all(rank, sizes.world_size, store, join_timeout_s)
    host = rendezvous.rpartition(":")[0]
    interface = _interface_towards(host)
    timeout = timedelta(seconds=call_timeout_s)
    group = PrefixStore("ranks", store)
    if device == "cuda":
        # Megatron relies on one queue for the order of its collectives and kernels.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        chosen = torch.device("cuda", 0)
        torch.cuda.set_device(chosen)
        distributed.init_process_group(
            "nccl", store=group, rank=rank, world_size=sizes.world_size, timeout=timeout, device_id=chosen
        )
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        distributed.init_process_group("gloo", store=group, rank=rank, world_size=sizes.world_size, timeout=timeout)
    return divide(sizes, call_timeout_s)


def join_alone(*, threads: int = 1, device: str = "cpu") -> Place:
    """A group of one, without a rendezvous port. Repeated calls are harmless."""
    torch.set_num_threads(threads)
    if not distributed.is_initialized():
        store = HashStore()
        timeout_s = _NOBODY_TO_WAIT_FOR_S
        address = f"{LOOPBACK}:0"
        return join(0, ONE_RANK, store, address, device=device, join_timeout_s=timeout_s, call_timeout_s=timeout_s)
    return divide(ONE_RANK, _NOBODY_TO_WAIT_FOR_S)


def divide(sizes: ParallelSizes, call_timeout_s: float) -> Place:
    """Make Megatron's groups over the ranks that have joined, unless they exist; the place of this rank.

    Raises RuntimeError where Megatron would place this rank elsewhere than `Place.of` does.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            distributed_timeout_minutes=call_timeout_s / 60.0,
        )
    place = Place.of(distributed.get_rank(), sizes)
    megatron = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    ours = (place.tensor, place.pipeline, place.context, place.data, place.expert, sizes.data)
    if megatron != ours:
        order = "(tp, pp, cp, dp, ep, size of dp)"
        raise RuntimeError(f"Megatron places rank {place.rank} at {megatron}, not at {ours} {order}")
    return place


def _await_all(rank: int, count: int, store: Any, timeout_s: float) -> None:
    """Return once every rank has reached this point."""
    keys = [f"rank {index}" for index in range(count)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except distributed.DistStoreError as error:
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise WaitTimeout(
            f"{missing} of {count} did not come within {timeout_s:g} s", waited_for=missing, timeout_s=timeout_s
        ) from error


def _own_address(host: str, port: int) -> str:
    """The address of this machine that packets to `host` leave from; the loopback where there is no route."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def _interface_towards(host: str) -> str:
    """The name of the network interface by which `host` is reached."""
    own = _own_address(str(socket.getaddrinfo(host, None)[0][4][0]), 9)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    raise RuntimeError(f"no network interface has the address {own}, from which {host} is reached")
