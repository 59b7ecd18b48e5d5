"""What the decoder needs of a Hugging Face config.json. What it does not compute is refused by name.

Attribute names are the Hugging Face ones: custom weight loaders read `model.config` as they do in SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.errors import ConfigError
from miles.models.architecture import architecture_of, rope_of, unsupported


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention, rotary positions and a gated SiLU MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the q, k and v projections have one (Qwen2)."""
    qk_norm: bool
    """Whether q and k are normalised per head before the rotation (Qwen3)."""
    dtype: str
    initializer_range: float
    eos_token_ids: tuple[int, ...]


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json` for the end-of-sequence ids). Raises ConfigError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--model-path {str(folder)!r}: cannot read config.json ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"--model-path {str(folder)!r}: config.json is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model-path {str(folder)!r}: config.json does not hold an object")
    if (problem := unsupported(values, embedded=True)) is not None:
        raise ConfigError(f"--model-path {str(folder)!r} {problem}")
    generation = folder / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
    return _from_values(values, eos)


def _from_values(values: Mapping[str, Any], generation_eos: object) -> ModelConfig:
    architecture, rope = architecture_of(values), rope_of(values)
    heads = values["num_attention_heads"]
    return ModelConfig(
        architecture=architecture,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
        max_position_embeddings=values["max_position_embeddings"],
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=values.get("dtype") or values.get("torch_dtype") or "float32",
        initializer_range=values.get("initializer_range", 0.02),
        eos_token_ids=tuple(sorted({*_token_ids(values.get("eos_token_id")), *_token_ids(generation_eos)})),
    )


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()
