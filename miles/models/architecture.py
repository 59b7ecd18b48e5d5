"""Which models can be trained and served, by their `config.json`: the one statement of it.

`miles.models.folder` asks before a run starts, the trainer and the embedded engine when they read the model. Fused
parameters, biases and tied heads of all of them have their place in `miles.weight_sync.parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}
)
"""Names in `architectures`, with the `model_type` of each."""


def architecture_of(values: Mapping[str, Any]) -> str:
    """The first of a config's `architectures`, or `none`."""
    named = values.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none"


def rope_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary positions, which newer configs call `rope_parameters`; empty where there are none."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def unsupported(values: Mapping[str, Any]) -> str | None:
    """What a config asks for that would be computed wrongly, as the end of a sentence about its folder; or None."""
    architecture = architecture_of(values)
    if architecture not in ARCHITECTURES:
        return f"is of architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
    rope = rope_of(values)
    asked = {
        "rope_type": (rope.get("rope_type") or rope.get("type") or "default", "default"),
        "hidden_act": (values.get("hidden_act", "silu"), "silu"),
        "attention_bias": (values.get("attention_bias") or False, False),
        "mlp_bias": (values.get("mlp_bias") or False, False),
        "use_sliding_window": (values.get("use_sliding_window") or False, False),
        "quantization_config": (values.get("quantization_config"), None),
    }
    for key, (value, wanted) in asked.items():
        if value != wanted:
            return f"has a config.json with {key}={value!r}; supported: {wanted!r}"
    return None
