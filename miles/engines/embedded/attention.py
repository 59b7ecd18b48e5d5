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
        rows, tokens = positions.shape
        _, _, all_rows, heads, capacity, head_dim = cache.data.shape
        self._cache = cache.data
        self._rows, self._heads, self._length = rows, heads, length
        self._scale = head_dim**-0.5
        # Flat index of (key or value, row, head, position) for every new token: one write stores both.
        first = (torch.arange(rows) * (heads * capacity)).unsqueeze(1) + positions
        part = torch.arange(2 * heads) * capacity
        part[heads:] += (all_rows - 1) * heads * capacity
        self._slots = (first.unsqueeze(2) + part).flatten()
        hidden = torch.arange(length) > positions.unsqueeze(2)
        mask = torch.zeros(hidden.shape, dtype=cache.data.dtype).masked_fill_(hidden, float("-inf"))
        self._mask = mask.repeat_interleave(heads, 0) if tokens == 1 else mask.unsqueeze(1)

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store the new keys and values and attend.

        query [rows, tokens, q_heads, head_dim], key_value [rows, tokens, 2 * kv_heads, head_dim] (keys first).
        Returns [rows, tokens, q_heads * head_dim].
        """
        cache = self._cache[layer]
        head_dim = query.shape[3]
        cache.view(-1, head_dim).index_copy_(0, self._slots, key_value.reshape(-1, head_dim))
        if query.shape[1] == 1:
            return self._decode(query, cache)
        keys, values = cache[:, : self._rows, :, : self._length]
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=self._mask, scale=self._scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

    def _decode(self, query: Tensor, cache: Tensor) -> Tensor:
        """One query a row: the query heads of a KV head are the rows of one small matrix product."""
        batch = self._rows * self._heads
        _, _, _, capacity, head_dim = cache.shape
        keys = cache[0].view(-1, capacity, head_dim)[:batch, : self._length]
        values = cache[1].view(-1, capacity, head_dim)[:batch, : self._length]
        grouped = query.reshape(batch, -1, head_dim)
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
        return torch.bmm(weights, values).view(self._rows, 1, -1)
