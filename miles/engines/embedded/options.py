"""Command line of the embedded engine. Flags carry SGLang's names, so that one launcher starts both kinds.

Imports nothing heavy: `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything one engine process is told at its start."""

    model_path: Path
    host: str
    port: int
    weight_version: str
    custom_weight_loaders: tuple[str, ...]
    """Dotted paths of functions `(model, named_tensors)` that `/update_weights_from_tensor` may name."""
    load_format: str
    """`auto` reads safetensors; `dummy` makes random weights from the config alone."""
    dtype: str
    """`auto` takes the config's."""
    max_running_requests: int
    max_queued_requests: int
    max_total_tokens: int | None
    """Prompt and generated tokens of all running requests together; None: no limit but slots x context."""
    context_length: int | None
    """Prompt and generated tokens of one request; None takes the config's max_position_embeddings."""
    chunked_prefill_size: int
    """Prompt tokens computed between two decode steps: bounds how long a long prompt stalls the others."""
    prefix_cache_tokens: int
    """Tokens whose KV is kept for prompts to come; 0 keeps none."""
    stream_delay_ms: float
    """How long tokens may gather before they are sent as one chunk (the last ones go at once); 0 sends every step's."""
    random_seed: int
    threads: int


def parse_options(argv: Sequence[str]) -> EngineOptions:
    """Parse the command line. Exits with code 2 and a message on a wrong flag (argparse)."""
    parser = argparse.ArgumentParser(prog="python -m miles.engines.embedded", allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", type=Path, required=True, help="Hugging Face folder")
    add("--host", default="127.0.0.1")
    add("--port", type=_port, required=True, help="0 takes a free one and prints it")
    add("--weight-version", default="default", help="first label of sampled tokens")
    add("--custom-weight-loader", nargs="*", default=[], metavar="PKG.MOD.FUNC")
    add("--load-format", choices=["auto", "dummy"], default="auto")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add("--max-running-requests", type=_positive, default=64)
    add("--max-queued-requests", type=_positive, default=8192)
    add("--max-total-tokens", type=_positive, default=None)
    add("--context-length", type=_positive, default=None)
    add("--chunked-prefill-size", type=_positive, default=2048)
    add("--prefix-cache-tokens", type=_not_negative, default=65536)
    add("--stream-delay-ms", type=_milliseconds, default=20.0)
    add("--random-seed", type=int, default=0)
    add("--threads", type=_positive, default=1, help="torch threads")
    given = parser.parse_args(argv)
    return EngineOptions(
        model_path=given.model_path,
        host=given.host,
        port=given.port,
        weight_version=given.weight_version,
        custom_weight_loaders=tuple(given.custom_weight_loader),
        load_format=given.load_format,
        dtype=given.dtype,
        max_running_requests=given.max_running_requests,
        max_queued_requests=given.max_queued_requests,
        max_total_tokens=given.max_total_tokens,
        context_length=given.context_length,
        chunked_prefill_size=given.chunked_prefill_size,
        prefix_cache_tokens=given.prefix_cache_tokens,
        stream_delay_ms=given.stream_delay_ms,
        random_seed=given.random_seed,
        threads=given.threads,
    )


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return number


def _milliseconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1000 milliseconds")
    return number
