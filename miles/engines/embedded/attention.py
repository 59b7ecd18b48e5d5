"""Attention of one step over KV rows: what all layers share is computed once, in the constructor.

Serves both a decode step (one new token a row) and a prefill (several, padded at the end). A query at position p sees
positions 0..p of its own row, so garbage behind a row's length and the keys of padding are never seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from miles.engines.embedded.kv_cache import KvRows


class StepAttention:
    """`positions` is [rows, tokens]: where each new token stands. Row i of the step is row i of `cache`.

    `length` is the highest position of the step plus one; the cache must have that capacity.
    """

    def __init__(self, cache: KvRows, positions: Tensor, length: int) -> None:
        data = cache.data
        layers, _, _, heads, capacity, head_dim = data.shape
        self._rows, self._tokens = positions.shape
        self._heads, self._head_dim = heads, head_dim
        self._scale = head_dim**-0.5
        self._slots = cache.slots(positions)
        self._stores = data.view(layers, -1, head_dim).unbind(0)
        mask = cache.mask(positions, length)
        if self._tokens == 1:
            # One query a row: the query heads of a KV head are the rows of one small matrix product.
            self._mask = mask.expand(-1, heads, -1, -1).reshape(-1, 1, length)
            seen = data.view(layers, 2, -1, capacity, head_dim)[:, :, : self._rows * heads, :length]
            self._keys, self._values = seen[:, 0].transpose(2, 3).unbind(0), seen[:, 1].unbind(0)
        else:
            self._mask = mask
            seen = data[:, :, : self._rows, :, :length]
            self._keys, self._values = seen[:, 0].unbind(0), seen[:, 1].unbind(0)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Store the new keys and values and attend.

        qkv [rows * tokens, q_heads + 2 * kv_heads, head_dim], keys before values, both rotated where they should be.
        Returns [rows * tokens, q_heads * head_dim].
        """
        q_heads = qkv.shape[1] - 2 * self._heads
        new = qkv.narrow(1, q_heads, 2 * self._heads)
        self._stores[layer].index_copy_(0, self._slots, new.reshape(-1, self._head_dim))
        keys, values = self._keys[layer], self._values[layer]
        if self._tokens == 1:
            query = qkv.narrow(1, 0, q_heads).reshape(self._rows * self._heads, -1, self._head_dim)
            scores = torch.baddbmm(self._mask, query, keys, alpha=self._scale)
            return torch.bmm(torch.softmax(scores, -1), values).view(self._rows, -1)
        query = qkv.view(self._rows, self._tokens, -1, self._head_dim)[:, :, :q_heads].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self._mask, scale=self._scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(qkv.shape[0], -1)
