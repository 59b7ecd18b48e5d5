"""Picks the next token of every row of a step, and says how likely the model itself found it.

The reported log-probability is log_softmax(logits / temperature)[token], before top-k and top-p cut the distribution
(log_softmax(logits) where temperature is 0): the trainer recomputes exactly that. A request that asks for its sampling
masks also gets the ids that the cut kept and the log-probability within them, as SGLang gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1.0 cut nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    masks: bool = False
    """Whether to tell what the cut kept."""

    @property
    def cuts(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


class Kept(NamedTuple):
    """The token ids one token was drawn from, likeliest first, and its log-probability among them."""

    ids: list[int]
    logprob: float


class Sampled(NamedTuple):
    """One step's tokens."""

    tokens: Tensor
    """[rows]"""
    logprobs: Tensor
    """[rows]"""
    kept: list[Kept | None] | None
    """None where no row asked for it."""


class BatchSampling:
    """The sampling settings of a step's rows as tensors. Made anew when a request joins or leaves."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self.all_greedy = all(row.temperature == 0 for row in rows)
        self.any_greedy = any(row.temperature == 0 for row in rows)
        self.any_cuts = any(row.cuts for row in rows)
        self.masked_rows = [index for index, row in enumerate(rows) if row.masks]
        temperatures = [row.temperature or 1.0 for row in rows]
        self.temperature: Tensor | None = None
        if any(temperature != 1.0 for temperature in temperatures):
            self.temperature = torch.tensor(temperatures).unsqueeze(1)
        if self.any_greedy:
            self.greedy = torch.tensor([row.temperature == 0 for row in rows])
        if self.any_cuts:
            self.top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64).unsqueeze(1)
            self.top_k = torch.tensor([row.top_k if row.top_k > 0 else 1 << 62 for row in rows]).unsqueeze(1)


class Sampler:
    """Draws from a generator of its own, so that the same seed and the same steps give the same tokens."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def sample(self, logits: Tensor, batch: BatchSampling) -> Sampled:
        """Sample one token per row of float32 logits [rows, vocabulary].

        Raises FloatingPointError for logits that are not finite: an engine that computes garbage must not serve it.
        """
        scaled = logits if batch.temperature is None else logits / batch.temperature
        logprobs = torch.log_softmax(scaled, -1)
        cut: _Cut | None = None
        if batch.all_greedy:
            tokens = logits.argmax(-1)
        else:
            if batch.any_cuts:
                cut = _Cut.of(logprobs, batch)
                tokens = cut.ids.gather(1, self._draw(cut.weights).unsqueeze(1)).squeeze(1)
            else:
                tokens = self._draw(logprobs.exp())
            if batch.any_greedy:
                tokens = torch.where(batch.greedy, logits.argmax(-1), tokens)
        picked = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        if not math.isfinite(picked.sum().item()):
            raise FloatingPointError("the model's logits are not finite")
        if not batch.masked_rows:
            return Sampled(tokens, picked, None)
        kept: list[Kept | None] = [None] * len(tokens)
        for row in batch.masked_rows:
            # Greedy sampling keeps one token, whatever else the row's settings say.
            if cut is None or (batch.any_greedy and bool(batch.greedy[row])):
                kept[row] = Kept([int(tokens[row])], 0.0)
            else:
                kept[row] = cut.kept(row, picked[row])
        return Sampled(tokens, picked, kept)

    def _draw(self, weights: Tensor) -> Tensor:
        """Indices drawn in proportion to non-negative weights [rows, n], by inverting the distribution function.

        In float64, so that the sum over a large vocabulary neither loses its tail nor reaches a token of weight 0.
        """
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        at = torch.rand((weights.shape[0], 1), generator=self._generator, dtype=torch.float64) * cumulative[:, -1:]
        return torch.searchsorted(cumulative, at, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


class _Cut(NamedTuple):
    """Tokens in descending order of probability, with weight 0 where the cut removed them; both [rows, vocabulary]."""

    ids: Tensor
    weights: Tensor

    @classmethod
    def of(cls, logprobs: Tensor, batch: BatchSampling) -> _Cut:
        """Top-k and top-p both measured on the whole distribution (not one after the other), as SGLang does."""
        ordered, ids = logprobs.exp().sort(-1, descending=True)
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        removed = (before > batch.top_p) | (torch.arange(ordered.shape[1]) >= batch.top_k)
        return cls(ids, ordered.masked_fill(removed, 0.0))

    def kept(self, row: int, logprob: Tensor) -> Kept:
        """What is left of a row, and `logprob` of its token normalised over it."""
        weights = self.weights[row]
        ids = self.ids[row][weights > 0].tolist()
        return Kept(ids, float(logprob - weights.sum(dtype=torch.float64).log()))
