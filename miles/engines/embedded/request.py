"""One generation request: what a client asked for, checked, and how far it has come.

`parse_request` runs on the event loop; from `Scheduler.submit` on a Request belongs to the scheduler thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from miles.engines.embedded.sampler import Kept, Sampling

N = TypeVar("N", int, float)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "stop": ([], ""),
    "stop_regex": ([], ""),
    "regex": ("",),
    "json_schema": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "logit_bias": ({},),
}
"""Sampling parameters of SGLang that the engine does not have, with the values that ask for nothing."""


class RequestRefused(Exception):
    """A call the engine will not do; answered with `status` and the message."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class Span:
    """Output tokens [start, end) were sampled under the weight version `version`."""

    version: str
    start: int
    end: int


class Update(NamedTuple):
    """What one step gave one request. `finish` and `spans` come with the last one."""

    output: Output
    token: int | None
    logprob: float
    version: str
    finish: dict[str, Any] | None
    spans: tuple[Span, ...]
    cached_tokens: int
    kept: Kept | None = None


class Output(Protocol):
    """Where a request's updates go, on the event loop."""

    def push(self, update: Update) -> None: ...


class Request:
    """`tokens` is the prompt and what was sampled so far; KV is needed for all of it but the last."""

    __slots__ = (
        "cached_tokens",
        "finished",
        "max_new_tokens",
        "order",
        "output",
        "prompt_length",
        "rid",
        "salt",
        "sampling",
        "spans",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        rid: str,
        prompt: list[int],
        salt: str,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        output: Output,
    ) -> None:
        self.rid = rid
        self.tokens = prompt
        self.prompt_length = len(prompt)
        self.salt = salt
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.output = output
        self.spans: list[Span] = []
        self.finished = False
        self.order = 0
        self.cached_tokens: int | None = None

    @property
    def reserved_tokens(self) -> int:
        """The most tokens it will ever hold KV for."""
        return self.prompt_length + self.max_new_tokens

    def accept(self, token: int, version: str) -> dict[str, Any] | None:
        """Append a sampled token. Returns the finish reason when it is the last one."""
        self.tokens.append(token)
        count = len(self.tokens) - self.prompt_length
        spans = self.spans
        if spans and spans[-1].version == version:
            spans[-1].end = count
        else:
            spans.append(Span(version, count - 1, count))
        if token in self.stop_ids:
            return {"type": "stop", "matched": token}
        return {"type": "length", "length": count} if count >= self.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked body of `/generate`."""

    rid: str
    prompt: list[int]
    salt: str
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    stream: bool
    return_logprob: bool

    def request(self, output: Output) -> Request:
        return Request(self.rid, self.prompt, self.salt, self.sampling, self.max_new_tokens, self.stop_ids, output)


def parse_request(body: Mapping[str, Any], limits: Limits) -> GenerateCall:
    """Check a body of `/generate`. Raises RequestRefused with a message that names the field."""
    prompt = _prompt(body, limits)
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestRefused("sampling_params must be an object (one request a call)")
    for name, value in params.items():
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise RequestRefused(f"sampling_params.{name}={value!r} is not supported by the embedded engine")
    max_new = _number(params, "max_new_tokens", 128, int, 1)
    stop_ids = params.get("stop_token_ids") or ()
    if not all(type(token) is int for token in stop_ids):
        raise RequestRefused("sampling_params.stop_token_ids must be a list of token ids")
    top_k = _number(params, "top_k", -1, int, -1)
    top_p = _number(params, "top_p", 1.0, float, 0.0)
    if top_k == 0 or not 0 < top_p <= 1:
        raise RequestRefused(f"top_k={top_k!r} must be -1 or positive, and top_p={top_p!r} in (0, 1]")
    if body.get("return_routed_experts"):
        raise RequestRefused("return_routed_experts: the embedded engine serves no model with experts")
    masks = bool(body.get("return_sampling_mask"))
    sampling = Sampling(_number(params, "temperature", 1.0, float, 0.0), top_p, top_k, masks)
    if masks and sampling.temperature > 0 and not sampling.cuts:
        raise RequestRefused("return_sampling_mask wants top_k or top_p: without them every token is kept")
    call = GenerateCall(
        rid=_text(body, "rid") or uuid.uuid4().hex,
        prompt=prompt,
        salt="\0".join(filter(None, (_text(body, "cache_salt"), _text(body, "extra_key")))),
        sampling=sampling,
        max_new_tokens=min(max_new, limits.context_length - len(prompt)),
        # As in SGLang, ignore_eos ignores every stop token.
        stop_ids=frozenset() if params.get("ignore_eos") else limits.eos_token_ids.union(stop_ids),
        stream=bool(body.get("stream")),
        return_logprob=bool(body.get("return_logprob")),
    )
    if len(prompt) + call.max_new_tokens > limits.max_total_tokens:
        raise RequestRefused(
            f"prompt of {len(prompt)} tokens and max_new_tokens={call.max_new_tokens} exceed --max-total-tokens "
            f"{limits.max_total_tokens}"
        )
    return call


def _prompt(body: Mapping[str, Any], limits: Limits) -> list[int]:
    prompt = body.get("input_ids")
    if body.get("text") is not None or prompt is None:
        raise RequestRefused("the engine has no tokenizer: send input_ids, not text")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise RequestRefused("input_ids must be a list of token ids, not empty (one request a call)")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise RequestRefused(f"input_ids holds a token outside [0, {limits.vocab_size})")
    if len(prompt) >= limits.context_length:
        raise RequestRefused(
            f"input_ids holds {len(prompt)} tokens: with one new token that exceeds the context of "
            f"{limits.context_length}"
        )
    return prompt


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestRefused(f"{name}={value!r} must be a string")
    return value


def _number(params: Mapping[str, Any], name: str, default: N, kind: type[N], least: N) -> N:
    value = params.get(name)
    if value is None:
        return default
    fits = type(value) is int or (kind is float and type(value) is float)
    if not fits or not value >= least:
        raise RequestRefused(f"sampling_params.{name}={value!r} must be {kind.__name__}, at least {least}")
    return kind(value)
