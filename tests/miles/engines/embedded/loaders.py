"""A custom weight loader for tests; it runs in the engine's process. The manifest is JSON that says what to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.engines.embedded.model import Decoder


def load(model: Decoder, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do what the manifest says."""
    manifest = json.loads(bytes(dict(named_tensors)["manifest"].numpy()))
    _COMMANDS[manifest["do"]](model, manifest)


def _zero(model: Decoder, manifest: dict[str, Any]) -> None:
    """All logits become 0, so greedy sampling gives token 0."""
    model.model.embed_tokens.weight.zero_()


def _halve_embedding(model: Decoder, manifest: dict[str, Any]) -> None:
    """In place on `.data`, as pull agents write."""
    model.model.embed_tokens.weight.data.mul_(0.5)


def _by_name(model: Decoder, manifest: dict[str, Any]) -> None:
    """Hugging Face names through `load_weights`, from tensors that a thread of the loader's made."""
    made: list[tuple[str, Tensor]] = []
    shape = (model.config.num_key_value_heads * model.config.head_dim, model.config.hidden_size)
    thread = threading.Thread(
        target=lambda: made.append(("model.layers.0.self_attn.k_proj.weight", torch.full(shape, manifest["value"])))
    )
    thread.start()
    thread.join()
    model.load_weights(made)


def _wait(model: Decoder, manifest: dict[str, Any]) -> None:
    """Hold the scheduler thread until the test opens and closes the other end of the pipe."""
    with open(manifest["ready"], "w"):
        pass
    with open(manifest["release"]) as pipe:
        pipe.read()


def _raise(model: Decoder, manifest: dict[str, Any]) -> None:
    raise RuntimeError("the loader gives up")


_COMMANDS: dict[str, Callable[[Decoder, dict[str, Any]], None]] = {
    "zero": _zero,
    "halve": _halve_embedding,
    "by_name": _by_name,
    "wait": _wait,
    "raise": _raise,
}
