"""Which models can be trained and served, by their `config.json`: the one statement of it. Torch-free.

`miles.models.folder` asks before a run starts, the trainer and the embedded engine when they read the model. What
would be computed wrongly is refused by name: Gemma 2 and 3, say, whose soft caps, windows and further norms
Megatron-core's layers do not have. The embedded engine serves less than the trainer trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3ForCausalLM": "qwen3",
        "Qwen2ForCausalLM": "qwen2",
        "LlamaForCausalLM": "llama",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "GemmaForCausalLM": "gemma",
    }
)
"""Names in `architectures` that the trainer takes, with the `model_type` of each."""

EMBEDDED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
"""Those that the embedded engine serves too: dense, with a SiLU."""

ROPE_TYPES = ("default", "linear", "llama3")
EMBEDDED_ROPE_TYPES = ("default",)
GELU_TANH = "gelu_pytorch_tanh"


def architecture_of(values: Mapping[str, Any]) -> str:
    """The first of a config's `architectures`, or `none`."""
    named = values.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none"


def rope_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary positions, which newer configs call `rope_parameters`; empty where there are none."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def ties_embeddings(values: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding; where the config does not say, only Gemma's is, as in transformers."""
    return bool(values.get("tie_word_embeddings", architecture_of(values) == "GemmaForCausalLM"))


def unsupported(values: Mapping[str, Any], *, embedded: bool = False) -> str | None:
    """What a config asks for that would be computed wrongly, as the end of a sentence about its folder; or None.

    With `embedded`, what the embedded engine cannot serve counts too.
    """
    architecture = architecture_of(values)
    if architecture not in ARCHITECTURES:
        return f"is of architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
    if embedded and architecture not in EMBEDDED_ARCHITECTURES:
        served = ", ".join(EMBEDDED_ARCHITECTURES)
        return f"is of architecture {architecture!r}; the embedded engine serves: {served}"
    for key, value, wanted in (*_common(values, embedded), *_particular(architecture, values)):
        if value not in wanted:
            whose = "the embedded engine serves" if embedded and key == "rope_type" else "supported"
            return f"has a config.json with {key}={value!r}; {whose}: {', '.join(map(repr, wanted))}"
    return None


def _common(values: Mapping[str, Any], embedded: bool) -> list[tuple[str, object, tuple[object, ...]]]:
    """(key, its value, the values that are computed rightly) of what every architecture may ask for."""
    rope = rope_of(values)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    windows = sorted({str(kind) for kind in values.get("layer_types") or ()} - {"full_attention"})
    return [
        ("rope_type", rope_type, EMBEDDED_ROPE_TYPES if embedded else ROPE_TYPES),
        ("partial_rotary_factor", partial, (1.0,)),
        ("attention_bias", values.get("attention_bias") or False, (False,)),
        ("mlp_bias", values.get("mlp_bias") or False, (False,)),
        ("use_sliding_window", values.get("use_sliding_window") or False, (False,)),
        ("layer_types", windows[0] if windows else "full_attention", ("full_attention",)),
        ("quantization_config", values.get("quantization_config"), (None,)),
    ]


def _particular(architecture: str, values: Mapping[str, Any]) -> list[tuple[str, object, tuple[object, ...]]]:
    """The same of what only this architecture may ask for."""
    if architecture == "GemmaForCausalLM":
        return [
            # Older configs say `gelu`; Gemma was trained with the tanh form, and transformers reads it so.
            ("hidden_act", values.get("hidden_act") or GELU_TANH, (GELU_TANH, "gelu")),
            ("hidden_activation", values.get("hidden_activation") or GELU_TANH, (GELU_TANH,)),
            ("use_bidirectional_attention", values.get("use_bidirectional_attention") or False, (False,)),
        ]
    silu = ("hidden_act", values.get("hidden_act", "silu"), ("silu",))
    if architecture != "Qwen3MoeForCausalLM":
        return [silu]
    return [
        silu,
        ("decoder_sparse_step", values.get("decoder_sparse_step", 1), (1,)),
        ("mlp_only_layers", values.get("mlp_only_layers") or [], ([],)),
    ]
