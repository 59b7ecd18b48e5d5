"""Attention under context parallelism on a GPU: the flash kernel aligns fewer queries with the last of their keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

SEQUENCES, QUERIES, HEADS, GROUPS, HEAD_DIM = 3, 24, 6, 2, 64


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("keys", [24, 72])
def test_queries_are_the_last_tokens_of_their_keys(keys: int) -> None:
    from miles.trainer.attention import SdpaCoreAttention

    def drawn(count: int, heads: int) -> Tensor:
        return torch.randn(SEQUENCES, count, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    inputs = (drawn(QUERIES, HEADS), drawn(keys, GROUPS), drawn(keys, GROUPS))
    attention = SdpaCoreAttention.__new__(SdpaCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = attention._cp_group = None
    found = attention._attend_last(*inputs)

    ones = torch.ones(QUERIES, keys, dtype=torch.bool, device="cuda")
    expected = masked(inputs, ones.tril(keys - QUERIES))
    assert relative(found, expected) < 5e-3
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream.double()),
        strict=True,
    ):
        assert relative(one, other) < 1e-2
    if keys > QUERIES:
        # Aligned with the first keys they would see far less.
        assert relative(found, masked(inputs, ones.tril())) > 0.1


def masked(inputs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    query, key, value = (x.double().transpose(1, 2) for x in inputs)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
