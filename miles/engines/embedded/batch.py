"""The running requests: row i of the KV cache, of the token tensor and of `requests` belong together.

Rows stay dense: when a request leaves, the last one moves into its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.engines.embedded.attention import StepAttention
from miles.engines.embedded.kv_cache import KvRows
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.request import Request
from miles.engines.embedded.sampler import BatchSampling, Kept, Sampler

_FIRST_CAPACITY = 63


class RunningBatch:
    """Up to `slots` requests that take part in every decode step."""

    def __init__(self, model: Decoder, sampler: Sampler, slots: int) -> None:
        self.requests: list[Request] = []
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._cache = KvRows(model.config, model.dtype, slots, _FIRST_CAPACITY)
        self._next = torch.zeros((slots, 1), dtype=torch.int64)
        self._positions = torch.zeros((slots, 1), dtype=torch.int64)
        # The same memory: setting one number of a tensor costs twenty times as much.
        self._next_by_row = self._next.numpy()
        self._positions_by_row = self._positions.numpy()
        self._sampling: BatchSampling | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        return self._slots - len(self.requests)

    def join(self, request: Request, segments: Sequence[Tensor]) -> None:
        """Add a request. `segments` hold the KV of all its tokens but the last, in order."""
        row = len(self.requests)
        self._cache.reserve(len(request.tokens))
        self._cache.place_all(row, segments)
        self._next_by_row[row] = request.tokens[-1]
        self._positions_by_row[row] = len(request.tokens) - 1
        self.requests.append(request)
        self._sampling = None

    def leave(self, row: int) -> None:
        """Remove the request of a row; the last request takes the row."""
        last = len(self.requests) - 1
        moved = self.requests.pop()
        if row != last:
            self.requests[row] = moved
            self._cache.move(last, row, len(moved.tokens) - 1)
            self._next_by_row[row] = self._next_by_row[last]
            self._positions_by_row[row] = self._positions_by_row[last]
        self._sampling = None

    def kv(self, row: int) -> Tensor:
        """The KV of a request's tokens but the last; a view."""
        return self._cache.view(row, 0, len(self.requests[row].tokens) - 1)

    def step(self) -> tuple[list[int], list[float], list[Kept | None] | None]:
        """Run one decode step: the next token of every request, its log-probability, and what it was drawn from.

        The caller appends each token to its request before it calls anything else.
        """
        rows = len(self.requests)
        length = max([len(request.tokens) for request in self.requests])
        self._cache.reserve(length)
        positions = self._positions[:rows]
        hidden = self._model(self._next[:rows], positions, StepAttention(self._cache, positions, length))
        if self._sampling is None:
            self._sampling = BatchSampling([request.sampling for request in self.requests])
        sampled = self._sampler.sample(self._model.logits(hidden), self._sampling)
        self._next[:rows, 0] = sampled.tokens
        positions += 1
        return sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.kept
