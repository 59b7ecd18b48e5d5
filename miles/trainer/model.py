"""From a Hugging Face folder to a Megatron-core GPTModel. What the model code cannot honour is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from controllers.errors import ConfigError
from miles.models.architecture import ARCHITECTURES
from miles.trainer.attention import SdpaCoreAttention
from miles.trainer.modules import LocalRMSNorm, LocalRotary

SUPPORTED_MODELS = tuple(ARCHITECTURES.values())
SUPPORTED_ROPE = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and switches of a dense decoder, read from a Hugging Face config."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    inv_freq: tuple[float, ...] | None = None
    """Rotary frequencies where they are not those of plain `rope_theta`."""

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all TP ranks."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json. Raises ConfigError for a missing or an unsupported model."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {str(folder)!r} holds no config.json", key="model.path")
    from transformers import AutoConfig

    return architecture_of(AutoConfig.from_pretrained(str(folder)))


def architecture_of(hf: Any) -> Architecture:
    """The architecture of a transformers config. Raises ConfigError where Miles would compute something else."""
    kind = hf.model_type
    if kind not in SUPPORTED_MODELS:
        raise ConfigError(f"model type {kind!r} is not supported; supported are {', '.join(SUPPORTED_MODELS)}")
    refused = {
        "hidden_act": (getattr(hf, "hidden_act", "silu"), "silu"),
        "attention_bias": (bool(getattr(hf, "attention_bias", False)), False),
        "mlp_bias": (bool(getattr(hf, "mlp_bias", False)), False),
        "use_sliding_window": (bool(getattr(hf, "use_sliding_window", False)), False),
    }
    for key, (value, wanted) in refused.items():
        if value != wanted:
            raise ConfigError(f"{kind} model with {key} = {value!r} is not supported: only {wanted!r}")
    rope = getattr(hf, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE:
        raise ConfigError(f"rope type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}")
    heads = hf.num_attention_heads
    return Architecture(
        model_type=kind,
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=heads,
        groups=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        intermediate=hf.intermediate_size,
        vocab=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        norm_eps=hf.rms_norm_eps,
        tied=bool(hf.tie_word_embeddings),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        rope_theta=float(rope["rope_theta"]),
        inv_freq=_scaled_frequencies(hf, rope_type),
    )


def _scaled_frequencies(hf: Any, rope_type: str) -> tuple[float, ...] | None:
    if rope_type == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf, torch.device("cpu"))
    if attention_factor != 1.0:
        raise ConfigError(f"rope type {rope_type!r} with attention factor {attention_factor!r} is not supported")
    return tuple(frequencies.tolist())


def megatron_config(arch: Architecture, *, tensor_parallel: int = 1) -> Any:
    """The TransformerConfig: fp32, no dropout, no fused kernels."""
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        cuda_graph_scope=[],
    )


def build_model(arch: Architecture, *, tensor_parallel: int = 1) -> Any:
    """A GPTModel of this rank's size, with memory for its parameters but no values: load weights before use.

    Needs `torch.distributed` and Megatron's parallel state. Returns logits [b, s, vocab / tp], not gathered.
    """
    config = megatron_config(arch, tensor_parallel=tensor_parallel)
    layer = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = LocalRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = LocalRMSNorm
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * arch.layers, layer_norm=LocalRMSNorm),
        vocab_size=arch.padded_vocab(tensor_parallel),
        max_sequence_length=arch.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )
    rotary = LocalRotary(
        arch.head_dim,
        rotary_percent=1.0,
        rotary_base=arch.rope_theta,
        use_cpu_initialization=True,
        cp_group=model.pg_collection.cp,
    )
    if arch.inv_freq is not None:
        rotary.inv_freq = torch.tensor(arch.inv_freq)
    model.rotary_pos_emb = rotary
    return model
