"""Small functions of tensors, fused by torch's compiler. On GPUs only: on CPU the plain functions run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)`, as fused kernels where the first argument, a tensor, is on a GPU."""
    first = args[0]
    if not (isinstance(first, Tensor) and first.is_cuda):
        return function(*args, **kwargs)
    result: R = compiled(function)(*args, **kwargs)
    return result


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` compiled, at its first call, for tensors of any length along their first dimension."""
    made: Callable[P, R] = torch.compile(function)

    def call(*args: Any, **kwargs: Any) -> R:
        # Packed micro-batches differ in length, and each recompilation costs seconds. Other dimensions do not vary:
        # left open too, they make slower kernels, and some the compiler fails on.
        for value in args:
            if isinstance(value, Tensor) and value.ndim:
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return made(*args, **kwargs)

    return call
