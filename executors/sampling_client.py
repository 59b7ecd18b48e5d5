"""The port through which the data plane generates. `miles.engines.sglang_client` implements it; `tests/fakes` too."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from executors.sampling_record import RoutingReport


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `stop_token_ids` end a sequence and are kept as its last token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    return_sampling_mask: bool = False
    """Ask for the tokens that top-k and top-p kept, and for logprobs normalised over them."""
    return_routed_experts: bool = False
    """Ask for the experts that each input token was routed to."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. `request_id` is unique and of fixed length (SGLang aborts by prefix)."""

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    routing_from: int = 0
    """First input token whose experts are asked for, where they are."""


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens [start, end) of this request were sampled under the weight version label `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of a request since the chunk before.

    `finish` is None until the last chunk: then `stop`, `length` or `abort`. `spans` is only on the last chunk and
    covers the whole request (empty where the server gives none). `kept` holds, per token, the tokens it was drawn from;
    where it does, `logprobs` are normalised over them. `routing` is only on the last chunk. Both only if asked for, and
    where the server tells them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None
    spans: tuple[LabelSpan, ...] = ()
    cached_tokens: int = 0
    kept: Sequence[Sequence[int]] | None = None
    routing: RoutingReport | None = None


class SamplingClient(Protocol):
    """Generates on an engine by its URL. Raises EngineUnreachable and EngineRejected of controllers.errors."""

    def generate(self, url: str, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream one request. Closing the iterator early does not abort it: call `abort` for that."""

    async def abort(self, url: str, request_id: str) -> None:
        """Abort one request by its exact id."""
