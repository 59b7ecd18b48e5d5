"""Small functions of tensors, fused by torch's compiler. On GPUs only: on CPU the plain functions run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor

Ts = TypeVarTuple("Ts")
R = TypeVar("R")


def fused(function: Callable[[Tensor, *Ts], R], first: Tensor, *rest: *Ts) -> R:
    """`function(first, *rest)`, as fused kernels where `first` is on a GPU."""
    return compiled(function)(first, *rest) if first.is_cuda else function(first, *rest)


@cache
def compiled(function: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """`function` compiled, at its first call, for tensors of any length along their first dimension."""
    made: Callable[[*Ts], R] = torch.compile(function)

    def call(*args: *Ts) -> R:
        # Packed micro-batches differ in length, and each recompilation costs seconds. Other dimensions do not vary:
        # left open too, they make slower kernels, and some the compiler fails on.
        for value in args:
            if isinstance(value, Tensor) and value.ndim:
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return made(*args)

    return call
