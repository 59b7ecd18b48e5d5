"""Small functions of tensors, fused by torch's compiler. Used on GPUs only: on CPU the plain functions run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@cache
def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as fused kernels, compiled at its first call for tensors of any length."""
    # Dynamic from the start: packed micro-batches differ in length, and each recompilation costs seconds.
    return torch.compile(function, dynamic=True, fullgraph=True)
