"""From an architecture to the Megatron-core GPTModel of one rank: its pipeline stage, its share of every layer.

Parameters come without values: `weights.load_hf` fills them. What Megatron-core decides by CUDA is decided here by the
device, so that CPU and GPU run the same model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from controllers.errors import ConfigError
from miles.trainer import routing_replay
from miles.trainer.architecture import Architecture, check_sizes, layers_of_stage
from miles.trainer.attention import SdpaCoreAttention
from miles.trainer.cpu_compat import building_on_cpu
from miles.trainer.layout import ALONE
from miles.trainer.modules import LocalRMSNorm, LocalRotary, ScaleOutput, ZeroCenteredRMSNorm
from miles.trainer.moe import HostDispatcher, PortableTopKRouter
from miles.trainer.parallel import Place
from miles.trainer.self_attention import FusedSelfAttention

CPU = torch.device("cpu")


def build_model(
    arch: Architecture,
    place: Place = ALONE,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> Any:
    """A GPTModel with memory for this rank's parameters but no values in it: load weights before use.

    Needs `torch.distributed` and Megatron's parallel state, and with tied embeddings over pipeline stages that first
    and last stage build at the same time. The last stage returns logits [b, s, padded vocab / tp], not gathered; the
    others hidden states [s, b, hidden]. Raises ConfigError for an architecture that does not fit the place.
    """
    check_sizes(arch, place.sizes)
    config = megatron_config(arch, place, device=device, dtype=dtype, recompute=recompute)
    layer = _layer_spec(arch)
    norm = _norm(arch)
    count = len(layers_of_stage(arch.layers, place))
    with building_on_cpu(HostDispatcher) if device.type == "cpu" else torch.cuda.device(device):
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm),
            vocab_size=arch.padded_vocab(place.sizes.tensor),
            max_sequence_length=arch.max_positions,
            pre_process=place.is_first_stage,
            post_process=place.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
        )
    model.rotary_pos_emb = _rotary(arch, model.pg_collection.cp, device)
    if arch.gemma and place.is_first_stage:
        model.embedding.register_forward_hook(ScaleOutput(arch.hidden**0.5))
    _mark_tensor_parallel(model)
    routing_replay.attach(model, place)
    return model.to(device)


def megatron_config(
    arch: Architecture,
    place: Place = ALONE,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> Any:
    """The TransformerConfig: no dropout, no fused kernels, gradients that are sums over tokens."""
    sizes = place.sizes
    if recompute and device.type == "cpu":
        raise ConfigError("trainer.recompute needs a GPU", key="trainer.recompute")
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        layernorm_zero_centered_gamma=arch.gemma,
        gated_linear_unit=True,
        activation_func=gelu_tanh if arch.gemma else F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        pipeline_model_parallel_layout=_pipeline_layout(arch, place),
        pipeline_dtype=dtype,
        variable_seq_lengths=sizes.pipeline > 1,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        # Also for dense models: Megatron refuses to combine the default with stages that pass on varying lengths.
        moe_token_dispatcher_type="alltoall",
        sequence_parallel=sizes.sequence,
        calculate_per_token_loss=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # The compiled SwiGLU; on CPU it would only wait for the compiler.
        bias_activation_fusion=device.type == "cuda" and not arch.gemma,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        cuda_graph_scope=[],
        **_expert_options(arch),
    )


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def _expert_options(arch: Architecture) -> dict[str, Any]:
    if arch.experts is None:
        return {}
    return {
        "num_moe_experts": arch.experts.count,
        "moe_router_topk": arch.experts.chosen,
        "moe_ffn_hidden_size": arch.experts.intermediate,
        # The softmax over the chosen alone is the softmax over all, normalised.
        "moe_router_pre_softmax": not arch.experts.normalised,
        "moe_router_dtype": "fp32",
        # No auxiliary loss: the gradient is that of the loss that was asked for, and of nothing else.
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def _pipeline_layout(arch: Architecture, place: Place) -> list[list[str]] | None:
    """Megatron's statement of which stage has what; None for one stage."""
    stages = place.sizes.pipeline
    if stages == 1:
        return None
    layers = [len(layers_of_stage(arch.layers, Place(place.sizes, pipeline=stage))) for stage in range(stages)]
    stated = [["decoder"] * count for count in layers]
    stated[0].insert(0, "embedding")
    stated[-1].append("loss")
    return stated


def _norm(arch: Architecture) -> type[LocalRMSNorm]:
    return ZeroCenteredRMSNorm if arch.gemma else LocalRMSNorm


def _layer_spec(arch: Architecture) -> Any:
    experts = None if arch.experts is None else arch.experts.count
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = _norm(arch)
    parts.self_attention.module = FusedSelfAttention
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = _norm(arch)
    if experts is not None:
        parts.mlp.submodules.router = PortableTopKRouter
    return layer


def _rotary(arch: Architecture, cp_group: Any, device: torch.device) -> LocalRotary:
    # The frequencies are computed on the CPU, as transformers does, and then moved.
    rotary = LocalRotary(
        arch.head_dim, rotary_percent=1.0, rotary_base=arch.rope_theta, use_cpu_initialization=True, cp_group=cp_group
    )
    if arch.inv_freq is not None:
        rotary.inv_freq = torch.tensor(arch.inv_freq)
    rotary.inv_freq = rotary.inv_freq.to(device)
    return rotary


def _mark_tensor_parallel(model: torch.nn.Module) -> None:
    """Say which weights are cut over TP, which Megatron does only where it draws their first values.

    Unmarked ones would be taken for replicas, and only the first rank's part would enter the gradient norm.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            dimension = 0
        elif isinstance(module, RowParallelLinear):
            dimension = 1
        else:
            continue
        if module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dimension, stride=1)
