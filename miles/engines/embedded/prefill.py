"""Computing the KV of prompts, several requests at a time or one long prompt in chunks.

A request's last token is not computed here: it goes through the decode step, which is the only place that samples.
So a prompt that is held in the prefix cache needs no prefill at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.engines.embedded.attention import StepAttention
from miles.engines.embedded.kv_cache import KvRows
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.request import Request


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued request, and the KV of its beginning that is already known: `held` tokens in `segments`."""

    request: Request
    held: int
    segments: list[Tensor]

    @property
    def missing(self) -> int:
        return len(self.request.tokens) - 1 - self.held


def choose_group(candidates: list[Candidate], budget: int) -> list[Candidate]:
    """The oldest candidate and those others that fit beside it in one padded batch of at most `budget` tokens.

    A shorter prompt may be padded to at most twice its length (or 16 tokens).
    """
    group = candidates[:1]
    longest = shortest = group[0].missing
    for candidate in candidates[1:]:
        most, least = max(longest, candidate.missing), min(shortest, candidate.missing)
        if most <= max(16, 2 * least) and most * (len(group) + 1) <= budget:
            group.append(candidate)
            longest, shortest = most, least
    return group


class Prefill:
    """One padded batch. Its KV lives in rows of its own until it is done; row i belongs to `requests[i]`."""

    def __init__(self, model: Decoder, group: list[Candidate], chunk: int) -> None:
        self.requests = [candidate.request for candidate in group]
        self._model = model
        self._chunk = chunk if len(group) == 1 else max(candidate.missing for candidate in group)
        self._starts = [candidate.held for candidate in group]
        self._lengths = [len(request.tokens) - 1 for request in self.requests]
        longest = max(candidate.missing for candidate in group)
        self._missing = longest
        self._done = 0
        self._cache = KvRows(model.config, model.dtype, len(group), max(self._starts) + longest)
        for row, candidate in enumerate(group):
            self._cache.place_all(row, candidate.segments)

    def advance(self) -> bool:
        """Compute the next chunk. True when all is computed."""
        count = min(self._chunk, self._missing - self._done)
        starts = [start + self._done for start in self._starts]
        tokens = [
            _padded(request.tokens[start : min(start + count, length)], count)
            for request, start, length in zip(self.requests, starts, self._lengths, strict=True)
        ]
        # Padding may reach beyond the context; it goes where no prompt has a token.
        last = self._model.context_length - 1
        positions = (torch.tensor(starts).unsqueeze(1) + torch.arange(count)).clamp_(max=last)
        attention = StepAttention(self._cache, positions, min(max(starts) + count, last + 1))
        self._model(torch.tensor(tokens), positions, attention)
        self._done += count
        return self._done == self._missing

    def result(self, row: int) -> Tensor:
        """The KV of `requests[row].tokens[:-1]`, [layers, 2, kv_heads, n, head_dim]; a view."""
        return self._cache.view(row, 0, self._lengths[row])


def _padded(tokens: list[int], count: int) -> list[int]:
    return tokens + [0] * (count - len(tokens))
