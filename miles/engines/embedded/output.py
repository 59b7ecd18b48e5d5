"""Tokens on their way from the scheduler to one client.

The scheduler pushes one update a step. A streaming handler is woken a little later (see StreamPacer) and takes all
that has come meanwhile, so that a fast model or a slow client gets fewer, longer chunks. What waits is bounded by the
request's own max_new_tokens. Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from miles.engines.embedded.request import Update
from miles.engines.embedded.sampler import Kept


class StreamPacer:
    """Lets the tokens of all streams gather for `delay_s`, then wakes their handlers together.

    Sending is what streaming costs: a step of a tiny model takes less time than writing each of its tokens to a
    socket. Where a step takes longer than the delay, every token still is a chunk of its own.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waiting: list[TokenOutput] = []

    def wake_later(self, output: TokenOutput) -> None:
        """Wake the handler of `output` when the delay that runs, or begins now, is over."""
        if not self._delay_s:
            output.wake()
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._delay_s, self._wake_all)
        self._waiting.append(output)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for output in waiting:
            output.wake()


class TokenOutput:
    """Gathers updates and hands them out as SGLang's JSON objects, each token once.

    `finished` is set as soon as the last update is here. Without a pacer all tokens come in one object at the end.
    """

    def __init__(
        self, rid: str, prompt_tokens: int, *, return_logprob: bool, pacer: StreamPacer | None, masks: bool = False
    ) -> None:
        self.finished = False
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._return_logprob = return_logprob
        self._pacer = pacer
        self._tokens: list[int] = []
        self._logprobs: list[tuple[float, int, None]] = []
        self._masks = masks
        self._kept: list[Kept] = []
        self._completed = 0
        self._last: Update | None = None
        self._paced = False
        self._ready = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, update: Update) -> None:
        """Take what one step gave."""
        if update.token is not None:
            self._tokens.append(update.token)
            if self._return_logprob:
                self._logprobs.append((update.logprob, update.token, None))
            if update.kept is not None:
                self._kept.append(update.kept)
        self._last = update
        if update.finish is not None:
            self.finished = True
            self.wake()
        elif self._pacer is not None and not self._paced:
            self._paced = True
            self._pacer.wake_later(self)

    def wake(self) -> None:
        """Let the handler take what is here."""
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_chunk(self) -> dict[str, Any]:
        """The tokens that came since the last chunk; it is the last one when `finished` is set on return."""
        while not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._waiter = None
        return self._take()

    def _take(self) -> dict[str, Any]:
        last = self._last
        assert last is not None
        tokens, self._tokens = self._tokens, []
        self._completed += len(tokens)
        # A wake-up that is still to come would find nothing: wait for one that is asked for from now on.
        self._ready = self._paced = False
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
        if self._masks:
            meta["output_token_sampling_mask"] = [kept.ids for kept in self._kept]
            meta["output_token_sampling_logprobs"] = [kept.logprob for kept in self._kept]
            self._kept = []
        if last.finish is not None:
            meta["weight_versions"] = [
                {"version": span.version, "start": span.start, "end": span.end} for span in last.spans
            ]
        return {"output_ids": tokens, "meta_info": meta}
