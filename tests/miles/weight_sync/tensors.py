"""The tensors that the tests publish, under their Hugging Face names. Light to import: test processes start with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.weight_sync.messages import Box

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 16, 4, 2, 8, 24, 40

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "model.layers.0.mlp.gate_proj.weight": (MLP, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (MLP, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    "model.norm.weight": (HIDDEN,),
}


@dataclass(frozen=True)
class LocalShard:
    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
