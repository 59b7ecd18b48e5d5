"""One streamed `/generate`, as an async iterator object of token chunks.

An object, not an async generator: leaving a loop over it early needs no `aclose` and runs no code in a task that may
be gone. Closing it drops the connection, which promises nothing about the request: to abort is a call of its own.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from controllers.errors import EngineRejected, EngineUnreachable
from executors.sampling_client import LabelSpan, TokenChunk
from miles.engines.http_errors import mapped_errors, refusal
from miles.engines.sampling_report import reported_kept, reported_routing

CALL = "/generate"
_DATA = b"data:"
_DONE = b"[DONE]"


class TokenStream:
    """Yields TokenChunk until one with `finish`. The request is sent at the first `anext`.

    Servers send either all tokens so far or only the new ones with each event; `meta_info.completion_tokens` tells
    how many are new, and those are the last ones in either style.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_chunks",
        "_closed",
        "_origin",
        "_received",
        "_response",
        "_routing_from",
        "_session",
        "_timeout",
        "_url",
    )

    def __init__(
        self,
        session: aiohttp.ClientSession,
        origin: str,
        url: URL,
        body: bytes,
        timeout: aiohttp.ClientTimeout,
        routing_from: int = 0,
    ) -> None:
        self._session = session
        self._origin = origin
        self._url = url
        self._body = body
        self._timeout = timeout
        self._routing_from = routing_from
        self._response: aiohttp.ClientResponse | None = None
        self._chunks: deque[TokenChunk] = deque()
        self._buffer = b""
        self._received = 0
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._closed:
                raise StopAsyncIteration
            try:
                await self._read()
            except BaseException:
                self.close()
                raise
        return self._chunks.popleft()

    def close(self) -> None:
        """Drop the connection if the answer is not whole. Safe at any time, and more than once."""
        self._closed = True
        if self._response is not None:
            self._response.close()

    async def aclose(self) -> None:
        """The same as `close`."""
        self.close()

    def __del__(self) -> None:
        if self._response is not None:
            self._response.close()

    async def _read(self) -> None:
        origin = self._origin
        if self._response is None:
            with mapped_errors(origin, CALL):
                self._response = await self._session.post(self._url, data=self._body, timeout=self._timeout)
            if self._response.status >= 400:
                raise await refusal(origin, CALL, self._response)
        with mapped_errors(origin, CALL):
            data = await self._response.content.readany()
        if not data:
            raise EngineUnreachable(f"{origin}{CALL}: the answer ended before the request did", url=origin, call=CALL)
        *lines, self._buffer = (self._buffer + data).split(b"\n") if self._buffer else data.split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and (text := line[len(_DATA) :].strip()) != _DONE:
                self._chunks.append(self._chunk(text))
        if self._chunks and self._chunks[-1].finish is not None:
            await self._finish()

    def _chunk(self, text: bytes) -> TokenChunk:
        try:
            event: dict[str, Any] = orjson.loads(text)
            if "error" in event:
                raise _refused(event["error"], self._origin)
            meta = event["meta_info"]
            finish = meta["finish_reason"]
            total: int = meta["completion_tokens"]
            # An engine that aborts a request it had retracted gives back fewer tokens than it has streamed.
            new = max(0, total - self._received)
            entries = meta["output_token_logprobs"][-new:] if new else ()
            if len(entries) != new:
                raise ValueError(f"{new} new tokens but {len(entries)} logprobs")
            self._received += new
            kept, logprobs = reported_kept(meta, new)
            return TokenChunk(
                token_ids=tuple([entry[1] for entry in entries]),
                logprobs=tuple([entry[0] for entry in entries]) if kept is None else logprobs,
                finish=None if finish is None else finish["type"],
                spans=() if finish is None else _spans(meta.get("weight_versions")),
                cached_tokens=meta.get("cached_tokens", 0),
                kept=kept,
                routing=None if finish is None else reported_routing(meta, self._routing_from),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnreachable(
                f"{self._origin}{CALL}: an event that cannot be read ({error!r}): {text[:200]!r}",
                url=self._origin,
                call=CALL,
            ) from error

    async def _finish(self) -> None:
        """Read to the end, so that the connection can be used again. The tokens are whole already."""
        assert self._response is not None
        try:
            with mapped_errors(self._origin, CALL):
                while await self._response.content.readany():
                    pass
        except EngineUnreachable:
            self._response.close()
        self._closed = True


def _spans(entries: list[dict[str, Any]] | None) -> tuple[LabelSpan, ...]:
    return tuple(LabelSpan(str(entry["version"]), entry["start"], entry["end"]) for entry in entries or ())


def _refused(error: Any, origin: str) -> EngineRejected:
    message, status = str(error), 500
    if isinstance(error, dict):
        message, code = str(error.get("message", error)), error.get("code")
        status = code if isinstance(code, int) else status
    return EngineRejected(f"{origin}{CALL} refused: {message}", url=origin, call=CALL, status=status)
