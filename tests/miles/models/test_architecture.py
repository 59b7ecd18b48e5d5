"""What is stated to be supported fits the trainer, the embedded engine and weight sync alike; the rest is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from controllers.errors import ConfigError
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.model_config import read_model_config
from miles.models.architecture import ARCHITECTURES, EMBEDDED_ARCHITECTURES, unsupported
from miles.trainer.architecture import read_architecture
from miles.trainer.layout import global_shapes
from miles.weight_sync.messages import make_layout
from miles.weight_sync.parameters import bind
from miles.weight_sync.plan import whole

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """A `config.json` of this architecture. Without `hidden_act`, each one's own is meant."""
    return {"architectures": [architecture], "model_type": ARCHITECTURES.get(architecture), **SIZES, **changes}


@pytest.mark.parametrize("architecture", EMBEDDED_ARCHITECTURES)
def test_what_is_trained_has_its_place_in_the_engine(architecture: str, tmp_path: Path) -> None:
    """Fails for an architecture that one of the three lacks, and where a bias has no place in a fused parameter."""
    values = config_of(architecture)
    assert unsupported(values, embedded=True) is None
    (tmp_path / "config.json").write_text(json.dumps(values))
    shapes = global_shapes(read_architecture(tmp_path))
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) is (architecture == "Qwen2ForCausalLM")
    layout = make_layout(0, 1, ((n, "float32", s, whole(s), 4 * math.prod(s)) for n, s in shapes.items()))
    model = Decoder(read_model_config(tmp_path), torch.float32, 32)
    assert len(bind(model, layout)) == len(shapes)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(EMBEDDED_ARCHITECTURES)))
def test_what_the_embedded_engine_does_not_serve_it_refuses_by_name(architecture: str, tmp_path: Path) -> None:
    """Fails where the engine asks only whether the model can be trained."""
    values = config_of(architecture)
    assert unsupported(values) is None
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"is of architecture '{architecture}'; the embedded engine serves: Qwen3"):
        read_model_config(tmp_path)


def test_scaled_positions_are_trained_and_refused_by_the_embedded_engine() -> None:
    values = config_of("LlamaForCausalLM", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert unsupported(values) is None
    problem = unsupported(values, embedded=True)
    assert problem == "has a config.json with rope_type='llama3'; the embedded engine serves: 'default'"


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "none"])
def test_another_architecture_is_refused_with_the_list(architecture: str) -> None:
    assert unsupported(config_of(architecture)) == (
        f"is of architecture {architecture!r}; supported: Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, "
        "Qwen3MoeForCausalLM, GemmaForCausalLM"
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("Qwen3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'; supported: 'silu'"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types='sliding_attention'; supported: 'full_attention'",
        ),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; supported: 1.0"),
        (
            "Qwen3ForCausalLM",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type='yarn'; supported: 'default', 'linear', 'llama3'",
        ),
        ("Qwen3ForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic'"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step=2; supported: 1"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]; supported: []"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act='silu'; supported: 'gelu_pytorch_tanh', 'gelu'"),
        ("GemmaForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    architecture: str, changes: dict[str, Any], problem: str
) -> None:
    found = unsupported(config_of(architecture, **changes))
    assert found is not None and found.startswith(f"has a config.json with {problem}")
