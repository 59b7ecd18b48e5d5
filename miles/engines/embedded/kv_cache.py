"""KV rows: the keys and values of up to `rows` sequences, in one tensor.

Running sequences occupy rows 0..n-1 without holes, so that a decode step reads plain slices and gathers nothing; the
owner keeps it so by moving the last row into a hole. Positions beyond a row's length hold finite garbage that no
query's mask lets through: a weight of 0 times NaN is NaN, so new memory is zeroed, never taken as it comes.
The position axis grows on demand: rows that are no longer than needed stay in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.engines.embedded.model_config import ModelConfig


class KvRows:
    """`data` is [layers, 2 (key, value), rows, kv_heads, capacity, head_dim]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, rows: int, capacity: int) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.data = torch.zeros(shape, dtype=dtype)
        self._first_slots = self._number_slots()
        self._numbers = torch.arange(capacity)
        self._hidden, self._seen = torch.tensor(float("-inf"), dtype=dtype), torch.tensor(0.0, dtype=dtype)

    @property
    def rows(self) -> int:
        return self.data.shape[2]

    @property
    def capacity(self) -> int:
        """Positions per row."""
        return self.data.shape[4]

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every row, keeping what is there."""
        old = self.capacity
        if length <= old:
            return
        # An odd capacity keeps rows off power-of-two strides, which would compete for the same cache sets.
        data = self.data.new_zeros((*self.data.shape[:4], (length + length // 2) | 1, self.data.shape[5]))
        data[..., :old, :] = self.data
        self.data = data
        self._first_slots = self._number_slots()
        self._numbers = torch.arange(self.capacity)

    def slots(self, positions: Tensor) -> Tensor:
        """Where the keys and values of new tokens go in a layer's `data` seen as [-1, head_dim].

        positions [rows, tokens] -> flat [rows * tokens * 2 * kv_heads]: for each token its keys by head, then values.
        """
        return (self._first_slots[: positions.shape[0]] + positions.unsqueeze(2)).flatten()

    def place(self, row: int, start: int, segment: Tensor) -> int:
        """Copy `segment` [layers, 2, kv_heads, n, head_dim] to positions start.. of a row; returns start + n."""
        end = start + segment.shape[3]
        self.data[:, :, row, :, start:end] = segment
        return end

    def place_all(self, row: int, segments: Sequence[Tensor]) -> int:
        """Copy consecutive segments to a row from position 0; returns the number of positions."""
        end = 0
        for segment in segments:
            end = self.place(row, end, segment)
        return end

    def view(self, row: int, start: int, end: int) -> Tensor:
        """Positions [start, end) of a row, as [layers, 2, kv_heads, n, head_dim]; shares memory."""
        return self.data[:, :, row, :, start:end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def mask(self, positions: Tensor, length: int) -> Tensor:
        """What queries at `positions` [rows, tokens] may see of positions 0..length: 0 or -inf.

        [rows, 1, tokens, length], to be added to scores.
        """
        hidden = self._numbers[:length] > positions.unsqueeze(2)
        return torch.where(hidden, self._hidden, self._seen).unsqueeze(1)

    def _number_slots(self) -> Tensor:
        """Position 0 of every row, as [rows, 1, 2 * kv_heads]."""
        _, parts, rows, heads, capacity, _ = self.data.shape
        numbers = torch.arange(parts * rows * heads).view(parts, rows, heads) * capacity
        return numbers.transpose(0, 1).reshape(rows, 1, parts * heads)
