"""The sizes and switches of a decoder, and whether they can be shared out as a run asks. Torch-free to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.errors import ConfigError
from miles.models.architecture import unsupported
from miles.models.folder import read_config
from miles.trainer.model_cut import check_cut
from miles.trainer.parallel import ParallelSizes, Place


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that each layer has in place of an MLP."""

    count: int
    chosen: int
    """Experts a token goes to."""
    intermediate: int
    normalised: bool
    """Whether the weights of the chosen experts add up to 1 (else they are their shares among all experts)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, read from a Hugging Face config."""

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
    experts: Experts | None = None
    gemma: bool = False
    """GeGLU (tanh form), norms that multiply by 1 + weight, embeddings multiplied by sqrt(hidden)."""

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all TP ranks."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json. Raises ConfigError, naming `model.path`, for a missing or an unsupported model."""
    if (problem := unsupported(read_config(folder))) is not None:
        raise ConfigError(f"model.path: {str(folder)!r} {problem}", key="model.path")
    from transformers import AutoConfig  # for the defaults of each model type

    return architecture_of(AutoConfig.from_pretrained(str(folder)))


def architecture_of(hf: Any) -> Architecture:
    """The architecture of a transformers config that `miles.models.architecture` supports."""
    kind = hf.model_type
    heads = hf.num_attention_heads
    experts = None
    if kind == "qwen3_moe":
        experts = Experts(hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, bool(hf.norm_topk_prob))
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
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        rope_theta=float(hf.rope_parameters["rope_theta"]),
        inv_freq=_scaled_frequencies(hf),
        experts=experts,
        gemma=kind == "gemma",
    )


def _scaled_frequencies(hf: Any) -> tuple[float, ...] | None:
    rope_type = hf.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](hf, torch.device("cpu"))
    if attention_factor != 1.0:
        raise ConfigError(f"rope type {rope_type!r} with attention factor {attention_factor!r} is not supported")
    return tuple(frequencies.tolist())


def check_sizes(arch: Architecture, sizes: ParallelSizes) -> None:
    """Raise ConfigError, naming the key, where the model cannot be shared out over `sizes`."""
    experts = arch.experts
    shape = {
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.groups,
        "num_hidden_layers": arch.layers,
        "intermediate_size": arch.intermediate,
        "num_experts": 0 if experts is None else experts.count,
        "moe_intermediate_size": 0 if experts is None else experts.intermediate,
    }
    check_cut(shape, sizes)


def layers_of_stage(layers: int, place: Place) -> range:
    """The layers of a pipeline stage. What does not divide evenly goes to inner stages, to the last one last."""
    stages = place.sizes.pipeline
    share, left = divmod(layers, stages)
    inner_first = [*range(1, stages - 1), 0, stages - 1]
    more = set(inner_first[:left])
    counts = [share + (stage in more) for stage in range(stages)]
    start = sum(counts[: place.pipeline])
    return range(start, start + counts[place.pipeline])
