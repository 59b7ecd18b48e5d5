"""Log-probabilities of given tokens from logits that may be cut over tensor-parallel ranks.

Convention, the same as the engines': log_softmax(logits / temperature). Padding columns never enter the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def scaled_logits(logits: Tensor, vocab: int, temperature: float, rank: int = 0) -> Tensor:
    """fp32 logits / temperature of shape [n, vocab / tp], with columns beyond the true vocabulary at -inf-like."""
    width = logits.shape[-1]
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    valid = min(width, vocab - rank * width)
    if valid < width:
        padding = torch.arange(width, device=logits.device) >= valid
        scaled = scaled.masked_fill(padding, torch.finfo(torch.float32).min)
    return scaled


def token_logprobs(scaled: Tensor, targets: Tensor) -> Tensor:
    """log p(target), [n], differentiable, from `scaled_logits` [n, vocab / tp] over the current TP group."""
    # Upstream works in place on an fp32 input and views it: a private contiguous copy keeps `scaled` intact.
    private = scaled.clone(memory_format=torch.contiguous_format)
    losses: Tensor = vocab_parallel_cross_entropy(private, targets)
    return -losses


@torch.no_grad()
def entropies(scaled: Tensor, tp_group: Any) -> Tensor:
    """Entropy of each row's distribution, [n], in nats."""
    parallel = tp_group.size() > 1
    top = scaled.amax(-1)
    if parallel:
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=tp_group)
    shifted = scaled - top.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack((weights.sum(-1), (weights * shifted.clamp_min(-1e4)).sum(-1)))
    if parallel:
        torch.distributed.all_reduce(sums, group=tp_group)
    return sums[0].log() - sums[1] / sums[0]
