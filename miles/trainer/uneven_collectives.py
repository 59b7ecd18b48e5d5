"""Megatron's gather and reduce-scatter along tokens, for gloo: it wants equal parts, and experts get unequal ones.

`cpu_compat` puts these in place of Megatron's; they go the upstream way where the parts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from torch import Tensor

_upstream_gather = mappings._gather_along_first_dim
_upstream_reduce_scatter = mappings._reduce_scatter_along_first_dim


def gather_along_first_dim(
    input_: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """The parts of all ranks, one after the other; `output_split_sizes` are their lengths."""
    ranks = group.size()
    if output_split_sizes is None or ranks == 1:
        gathered: Tensor = _upstream_gather(input_, group, output_split_sizes, use_global_buffer)
        return gathered
    output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
    sent = torch.cat([input_] * ranks)
    torch.distributed.all_to_all_single(output, sent, list(output_split_sizes), [len(input_)] * ranks, group=group)
    return output


def reduce_scatter_along_first_dim(
    input_: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """This rank's part of the sum over all ranks; `input_split_sizes` are the lengths of all parts."""
    ranks = group.size()
    if input_split_sizes is None or ranks == 1:
        reduced: Tensor = _upstream_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        return reduced
    length = input_split_sizes[group.rank()]
    received = input_.new_empty((ranks, length, *input_.shape[1:]))
    torch.distributed.all_to_all_single(
        received.flatten(0, 1), input_.contiguous(), [length] * ranks, list(input_split_sizes), group=group
    )
    return received.sum(0)
