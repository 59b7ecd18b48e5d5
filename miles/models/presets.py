"""Models made on the spot: a small random network and its byte-level tokenizer, in Hugging Face format.

Owns the preset table. A preset is a function of its name and a seed: the same two always write the same bytes, and
no global random state is read or changed. Neither torch nor transformers is imported, since a run's start waits for
this, and numpy only to draw weights: `miles check` asks for a preset's shape. The assembly calls `write_preset`;
whatever loads a Hugging Face folder loads the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controllers.errors import ConfigError
from miles.models.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, write_byte_tokenizer
from miles.registry import did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Qwen3Shape:
    """The sizes of a Qwen3 network with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context_length: int
    init_std: float = 0.05

    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_length,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": self.init_std,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.layers,
            "bos_token_id": None,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "float32",
        }

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter, in the order in which they are drawn. The output head is tied."""
        yield "model.embed_tokens.weight", (VOCAB_SIZE, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.self_attn.q_proj.weight", (self.heads * self.head_dim, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (self.kv_heads * self.head_dim, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)

    def initial_weights(self, seed: int) -> dict[str, npt.NDArray[np.float32]]:
        """Norms are ones, everything else is drawn from N(0, init_std^2)."""
        import numpy as np

        generator = np.random.default_rng(seed)
        return {
            name: np.ones(shape, np.float32)
            if len(shape) == 1
            else generator.standard_normal(shape, dtype=np.float32) * np.float32(self.init_std)
            for name, shape in self.parameters()
        }


_SHAPES: dict[str, Qwen3Shape] = {
    "tiny-qwen3": Qwen3Shape(
        hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, context_length=512
    ),
}

PRESETS: tuple[str, ...] = tuple(_SHAPES)
"""The names `model.preset` accepts."""


def preset_shape(name: str) -> Qwen3Shape:
    """The sizes of a preset. Raises ConfigError for a name that is not in `PRESETS`."""
    if name not in _SHAPES:
        raise ConfigError(f"model.preset: unknown preset {name!r}{did_you_mean(name, PRESETS)}", key="model.preset")
    return _SHAPES[name]


def write_preset(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the preset `name` to `folder` (made if missing) and return it.

    Float32 weights. Raises ConfigError for an unknown name, before anything is written.
    """
    from safetensors.numpy import save_file

    shape = preset_shape(name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(shape.initial_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder, context_length=shape.context_length)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    return folder
