"""SGLang's HTTP API as calls: generation for the data plane, control for the engine of the control plane.

One aiohttp session for all engines of a process, without a limit of connections: a probe or an abort never waits
behind generation. Every call raises EngineUnreachable when no answer comes and EngineRejected when it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import anyio
import orjson
from yarl import URL

from controllers.errors import EngineRejected
from controllers.ports import EngineHealth, PauseMode
from executors.sampling_client import GenerateRequest
from miles.engines.http_errors import mapped_errors, refusal
from miles.engines.token_stream import TokenStream

_HEADERS = {"Content-Type": "application/json"}
_SKIPPED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn, SGLang's server, closes an idle connection."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """`chunk_timeout_s` is the longest silence within a stream; None waits for ever (a paused engine is silent).

    `salt_field` is `extra_key` for servers before SGLang 0.5.20.
    """

    connect_timeout_s: float = 5.0
    control_timeout_s: float = 30.0
    chunk_timeout_s: float | None = None
    salt_field: Literal["cache_salt", "extra_key"] = "cache_salt"


class SGLangClient:
    """An async context manager. Implements executors.sampling_client.SamplingClient."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[tuple[str, str], URL] = {}
        self._without_update_brackets: set[str] = set()
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._options.connect_timeout_s, sock_read=self._options.chunk_timeout_s
        )

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            skip_auto_headers=_SKIPPED_HEADERS,
            auto_decompress=False,
            timeout=self._stream_timeout,
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def generate(self, url: str, request: GenerateRequest) -> TokenStream:
        """Stream one request. Closing the stream early does not abort it: call `abort` for that."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": request.input_ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": sampling.stop_token_ids,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "stream": True,
            self._options.salt_field: request.cache_salt,
        }
        if sampling.return_sampling_mask:
            body["return_sampling_mask"] = True
        if sampling.return_routed_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routing_from}
        data = orjson.dumps(body)
        return TokenStream(
            self._open, url, self._url(url, "/generate"), data, self._stream_timeout, request.routing_from
        )

    async def abort(self, url: str, request_id: str) -> None:
        """Abort one request by its exact id; unknown ids are ignored."""
        await self._post(url, "/abort_request", {"rid": request_id, "abort_all": False})

    async def abort_all(self, url: str) -> None:
        """Abort every running and queued request."""
        await self._post(url, "/abort_request", {"rid": "", "abort_all": True})

    async def check_health(self, url: str, timeout_s: float) -> dict[str, Any]:
        """Return when the server calls itself healthy, with what it says about itself (SGLang says nothing)."""
        return await self._call("GET", url, "/health", None, timeout_s)

    async def health(self, url: str, timeout_s: float) -> EngineHealth:
        """Probe it, and read its progress."""
        answer = await self.check_health(url, timeout_s)
        if "tokens_generated" not in answer:
            answer = await self.server_info(url, timeout_s)
        return EngineHealth(
            tokens_generated=int(answer.get("tokens_generated", 0)),
            running=int(answer.get("running", 0)),
            weight_version=str(answer.get("weight_version", "")),
        )

    async def server_info(self, url: str, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server was started with, and its state."""
        return await self._call("GET", url, "/server_info", None, timeout_s)

    async def pause(self, url: str, mode: PauseMode) -> None:
        """Stop generating. Returns when no step is running."""
        await self._post(url, "/pause_generation", {"mode": mode})

    async def resume(self, url: str) -> None:
        """Go on generating; harmless when not paused."""
        await self._post(url, "/continue_generation", {})

    async def set_weight_version(self, url: str, label: str) -> None:
        """Set the label of tokens sampled from now on. The server's default would abort every request."""
        await self._post(url, "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def update_weights(self, url: str, loader: str, payloads: Sequence[str], timeout_s: float) -> None:
        """Run a custom weight loader over `payloads`, one encoded tensor list per tensor-parallel rank.

        Newer servers want a session around it, older ones do not know the call; which is which is remembered. A
        session that was opened is closed on every way out, because the server would refuse the next.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": loader,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        opened = await self._begin_update(url, timeout_s)
        if opened:
            # With speculative decoding the loader would run once per model: the target's weights are ours.
            body["selector"] = "target"
        try:
            await self._post(url, "/update_weights_from_tensor", body, timeout_s)
        finally:
            if opened:
                with anyio.CancelScope(shield=True):
                    await self._post(url, "/end_weight_update", {}, timeout_s)

    def forget(self, url: str) -> None:
        """Drop what was remembered of a server that is gone; its port may come back with another one."""
        self._without_update_brackets.discard(url)
        for key in [key for key in self._urls if key[0] == url]:
            del self._urls[key]

    async def _begin_update(self, url: str, timeout_s: float) -> bool:
        if url in self._without_update_brackets:
            return False
        try:
            await self._post(url, "/begin_weight_update", {"selector": "target"}, timeout_s)
        except EngineRejected as refused:
            if refused.status != 404:
                raise
            self._without_update_brackets.add(url)
            return False
        return True

    async def _post(
        self, url: str, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        return await self._call("POST", url, path, orjson.dumps(body), timeout_s)

    async def _call(
        self, method: str, url: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> dict[str, Any]:
        options = self._options
        timeout = aiohttp.ClientTimeout(
            total=options.control_timeout_s if timeout_s is None else timeout_s, sock_connect=options.connect_timeout_s
        )
        with mapped_errors(url, path):
            async with self._open.request(method, self._url(url, path), data=body, timeout=timeout) as response:
                if response.status >= 400:
                    raise await refusal(url, path, response)
                content = await response.read()
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            return {}  # some answers are a sentence or nothing
        return answer if isinstance(answer, dict) else {}

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("SGLangClient is used outside its `async with`")
        return self._session

    def _url(self, url: str, path: str) -> URL:
        """A parsed URL, kept: parsing costs as much as a small request."""
        key = (url, path)
        parsed = self._urls.get(key)
        if parsed is None:
            parsed = self._urls[key] = URL(url + path)
        return parsed
