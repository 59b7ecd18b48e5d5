"""A scheduler with a real model in the test's own process, and requests to it without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from miles.engines.embedded.checkpoint import load_model_weights
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.model_config import read_model_config
from miles.engines.embedded.prefix_cache import PrefixCache
from miles.engines.embedded.request import Request, Update
from miles.engines.embedded.sampler import Sampler, Sampling
from miles.engines.embedded.scheduler import Scheduler

CONTEXT = 512


def read_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The folder's model."""
    model = Decoder(read_model_config(folder), dtype, CONTEXT)
    load_model_weights(model, folder)
    return model


class Collected:
    """The output of one request: what has come, and `ended`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.last: Update | None = None
        self.ended = asyncio.Event()
        self._counts: dict[int, asyncio.Event] = {}

    def push(self, update: Update) -> None:
        if update.token is not None:
            self.tokens.append(update.token)
            self.logprobs.append(update.logprob)
        self.last = update
        if update.finish is not None:
            self.ended.set()
        if len(self.tokens) in self._counts:
            self._counts[len(self.tokens)].set()

    async def until(self, count: int) -> None:
        """Wait until `count` tokens have come."""
        if len(self.tokens) < count:
            await self._counts.setdefault(count, asyncio.Event()).wait()

    @property
    def finish(self) -> str:
        assert self.last is not None and self.last.finish is not None
        return str(self.last.finish["type"])

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        assert self.last is not None
        return [(span.version, span.start, span.end) for span in self.last.spans]

    @property
    def cached(self) -> int:
        assert self.last is not None
        return self.last.cached_tokens


class InProcess:
    """A running scheduler. An async context manager."""

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int = 16,
        max_total_tokens: int = 10_000,
        chunk: int = 256,
        prefix_tokens: int = 4096,
    ) -> None:
        self.scheduler = Scheduler(
            model,
            Sampler(0),
            PrefixCache(prefix_tokens),
            slots=slots,
            max_total_tokens=max_total_tokens,
            chunk=chunk,
            weight_version="v1",
        )

    async def __aenter__(self) -> Self:
        self.scheduler.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.scheduler.abort_all()
        assert self.scheduler.stop(10)

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        rid: str | None = None,
        salt: str = "",
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Collected:
        """Start a request, greedy unless told otherwise."""
        output = Collected()
        self.scheduler.submit(
            Request(
                rid or f"request-{id(output)}",
                list(prompt),
                salt,
                sampling or Sampling(0.0),
                count,
                frozenset(stop_ids),
                output,
            )
        )
        return output

    async def generate(self, prompt: Sequence[int], count: int, salt: str = "") -> Collected:
        """Run one request to its end."""
        output = self.submit(prompt, count, salt=salt)
        await output.ended.wait()
        return output
