"""Tokens on their way from the scheduler to one client.

The scheduler pushes one update a step; the client's handler takes all that has come since it last asked, so a slow
client gets longer chunks. What waits is bounded by the request's own max_new_tokens. Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.engines.embedded.request import Update


class TokenOutput:
    """Gathers updates; `next_chunk` hands them out as SGLang's JSON objects, each token once."""

    def __init__(self, rid: str, prompt_tokens: int, *, return_logprob: bool, interval: int) -> None:
        self.finished = False
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._return_logprob = return_logprob
        self._interval = interval
        self._due = 1
        self._tokens: list[int] = []
        self._logprobs: list[tuple[float, int, None]] = []
        self._completed = 0
        self._last: Update | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, update: Update) -> None:
        """Take what one step gave. Called on the event loop, once a step."""
        if update.token is not None:
            self._tokens.append(update.token)
            if self._return_logprob:
                self._logprobs.append((update.logprob, update.token, None))
        self._last = update
        if update.finish is not None:
            self.finished = True
        waiter = self._waiter
        if waiter is not None and not waiter.done() and self._is_due():
            waiter.set_result(None)

    async def next_chunk(self) -> dict[str, Any]:
        """The tokens that came since the last chunk, at least one (none with a finish reason of its own).

        The chunk after which `finished` is set and nothing is left is the last one.
        """
        if not self._is_due():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        return self._take()

    async def whole(self) -> dict[str, Any]:
        """All tokens in one object, when the request has ended."""
        self._due = 1 << 62
        return await self.next_chunk()

    def _is_due(self) -> bool:
        return self.finished or len(self._tokens) >= self._due

    def _take(self) -> dict[str, Any]:
        last = self._last
        assert last is not None
        tokens, self._tokens = self._tokens, []
        self._completed += len(tokens)
        self._due = self._interval
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": last.finish,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completed,
            "cached_tokens": last.cached_tokens,
            "weight_version": last.version,
        }
        if self._return_logprob:
            meta["output_token_logprobs"], self._logprobs = self._logprobs, []
        if last.finish is not None:
            meta["weight_versions"] = [
                {"version": span.version, "start": span.start, "end": span.end} for span in last.spans
            ]
        return {"output_ids": tokens, "meta_info": meta}
