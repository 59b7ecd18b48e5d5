"""The decoder in plain torch. Parameters are fused and named as SGLang's, so one weight loader serves both engines.

Called by the scheduler (forward), by custom weight loaders (`named_parameters`, `config`, `load_weights`) and by the
weight updater. No buffer is derived from a parameter: whatever proves the parameters proves the model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from miles.engines.embedded.attention import StepAttention
from miles.engines.embedded.model_config import ModelConfig

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class RmsNorm:
    """Root-mean-square norm over an axis of `size`, computed in float32.

    Its numbers are tensors: on a batch this small, an operation with a Python number takes three times as long.
    """

    def __init__(self, size: int, eps: float) -> None:
        self._inverse = torch.tensor(1 / size)
        self._eps = torch.tensor(eps)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        mean = torch.addcmul(self._eps, torch.linalg.vecdot(wide, wide), self._inverse)
        normed = (wide * mean.rsqrt_().unsqueeze(-1)).to(x.dtype)
        return normed.mul_(weight)


class Weight(nn.Module):
    """A weight, and a bias where the projection has one. A module only for the sake of parameter names."""

    def __init__(self, *shape: int, bias: bool = False, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype), requires_grad=False) if bias else None


class Attention(nn.Module):
    """`qkv_proj` rows: all q heads, then k, then v."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        q = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Weight(q + 2 * kv, config.hidden_size, bias=config.attention_bias, dtype=dtype)
        self.o_proj = Weight(config.hidden_size, q, dtype=dtype)
        if config.qk_norm:
            self.q_norm = Weight(config.head_dim, dtype=dtype)
            self.k_norm = Weight(config.head_dim, dtype=dtype)


class Mlp(nn.Module):
    """`gate_up_proj` rows: gate, then up."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Weight(2 * config.intermediate_size, config.hidden_size, dtype=dtype)
        self.down_proj = Weight(config.hidden_size, config.intermediate_size, dtype=dtype)


class Layer(nn.Module):
    """One transformer block.

    Keeps its Parameter objects at hand (a module's attribute lookup costs a microsecond), in tuples, so that they are
    not registered under a second name.
    """

    def __init__(self, index: int, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, dtype)
        self.mlp = Mlp(config, dtype)
        self.input_layernorm = Weight(config.hidden_size, dtype=dtype)
        self.post_attention_layernorm = Weight(config.hidden_size, dtype=dtype)
        self._index, self._config = index, config
        self._norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self._head_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        attn, mlp = self.self_attn, self.mlp
        self._norm_weights = (self.input_layernorm.weight, self.post_attention_layernorm.weight)
        self._head_norm_weights = (attn.q_norm.weight, attn.k_norm.weight) if config.qk_norm else None
        self._matrices = (attn.qkv_proj.weight, attn.o_proj.weight, mlp.gate_up_proj.weight, mlp.down_proj.weight)
        self._biases = (attn.qkv_proj.bias,)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        """x [n, hidden], cos and sin [n, 1, head_dim] -> [n, hidden], for the n new tokens of a step."""
        config, norm = self._config, self._norm
        qkv_weight, o_weight, gate_up_weight, down_weight = self._matrices
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        qkv = F.linear(norm(x, self._norm_weights[0]), qkv_weight, self._biases[0])
        qkv = qkv.view(x.shape[0], -1, head_dim)
        rotated = qkv.narrow(1, 0, config.num_attention_heads + kv_heads)
        normed = rotated
        if self._head_norm_weights is not None:
            q_weight, k_weight = self._head_norm_weights
            q_heads = config.num_attention_heads
            both = torch.cat((q_weight.expand(q_heads, -1), k_weight.expand(kv_heads, -1)))
            normed = self._head_norm(rotated, both)
        # sin is negative in its first half, so rolling by half a head is the rotation.
        torch.addcmul(normed * cos, normed.roll(head_dim // 2, -1), sin, out=rotated)
        x = x + F.linear(attention(self._index, qkv), o_weight)
        gate, up = F.linear(norm(x, self._norm_weights[1]), gate_up_weight).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), down_weight).add_(x)


class Transformer(nn.Module):
    """Embedding, layers and the final norm: what SGLang calls `model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(i, config, dtype) for i in range(config.num_hidden_layers))
        self.norm = Weight(config.hidden_size, dtype=dtype)


class Decoder(nn.Module):
    """A Qwen3 (Qwen2, Llama) language model. `config` holds the Hugging Face config values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config, dtype)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Weight(config.vocab_size, config.hidden_size, dtype=dtype)
        )
        self._layers: list[Layer] = [layer for layer in self.model.layers if isinstance(layer, Layer)]
        inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), inverse)
        cos, sin = angles.cos(), angles.sin()
        # [positions, 2 (cos, sin), head_dim]. No buffer: it belongs to positions, not to the weights.
        self._rotations = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
        self._norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def context_length(self) -> int:
        """Positions there are rotations for."""
        return self._rotations.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """Token ids and positions [rows, tokens] -> last hidden states [rows * tokens, hidden], before the norm.

        Stores the tokens' keys and values in the cache behind `attention`.
        """
        rotations = self._rotations.index_select(0, positions.flatten())
        cos, sin = rotations.narrow(1, 0, 1), rotations.narrow(1, 1, 1)
        x = self.model.embed_tokens.weight.index_select(0, tokens.flatten())
        for layer in self._layers:
            x = layer(x, cos, sin, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states [n, hidden] -> float32 logits [n, vocabulary]."""
        normed = self._norm(hidden, self.model.norm.weight)
        return F.linear(normed, self.lm_head.weight).float()

    def destination(self, name: str) -> Tensor | None:
        """The live memory that the Hugging Face tensor `name` belongs to; None where the model has no use for it.

        Parameters' own (fused) names are understood too. Raises KeyError for a name that is neither.
        """
        parameters = dict(self.named_parameters())
        if name in parameters:
            return parameters[name].data
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings):
            return None
        for part, (fused, place) in _FUSED.items():
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                start, end = self._fused_rows(fused, place)
                return parameters[target].data[start:end]
        raise KeyError(f"the model has no parameter for {name!r}")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy Hugging Face tensors into the live parameters, each as it comes.

        Raises KeyError for an unknown name and ValueError for a wrong shape; tensors before it are written by then.
        """
        for name, tensor in weights:
            target = self.destination(name)
            if target is None:
                continue
            if target.shape != tensor.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model wants {list(target.shape)}")
            target.copy_(tensor)

    def initialize(self, seed: int) -> None:
        """Fill the parameters with random values, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.data.zero_()
            elif "norm" in name:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, self.config.initializer_range, generator=generator)

    def _fused_rows(self, fused: str, place: int) -> tuple[int, int]:
        config = self.config
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        sizes = [q, kv, kv] if fused == "qkv_proj" else [config.intermediate_size] * 2
        start = sum(sizes[:place])
        return start, start + sizes[place]
