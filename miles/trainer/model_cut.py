"""Whether parallel sizes can cut a model, read from its `config.json`. Torch-free: `miles check` and the ranks call it.

Layers need not divide evenly over the pipeline stages: `architecture.layers_of_stage` hands out what is left over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from controllers.errors import ConfigError
from miles.trainer.parallel import ParallelSizes


def check_cut(model: Mapping[str, Any], sizes: ParallelSizes) -> None:
    """Raise the ConfigError of the first size that does not divide what it cuts; the message names both."""
    for key, size, what, count in _cuts(model, sizes):
        if count % size:
            raise ConfigError(f"{key}: {size} ranks cannot share {count} {what}", key=key)
    layers = model.get("num_hidden_layers")
    if isinstance(layers, int) and layers < sizes.pipeline:
        key = "trainer.pipeline_parallel"
        raise ConfigError(f"{key}: {sizes.pipeline} ranks cannot share {layers} layers", key=key)
    if _experts(model) and sizes.tensor > 1 and not sizes.sequence:
        # Otherwise every tensor-parallel rank would send the same tokens to the experts.
        key = "trainer.sequence_parallel"
        raise ConfigError(f"{key}: tensor parallelism over a mixture of experts needs it", key=key)


def _cuts(model: Mapping[str, Any], sizes: ParallelSizes) -> Iterator[tuple[str, int, str, int]]:
    """(configuration key, its size, what it cuts, how many there are of it)."""
    heads = int(model.get("num_attention_heads") or 1)
    experts = _experts(model)
    tensor = "trainer.tensor_parallel"
    yield tensor, sizes.tensor, "attention heads", heads
    yield tensor, sizes.tensor, "key/value heads", int(model.get("num_key_value_heads") or heads)
    if experts:
        yield tensor, sizes.tensor, "columns of an expert", int(model.get("moe_intermediate_size") or sizes.tensor)
    else:
        yield tensor, sizes.tensor, "columns of the MLP", int(model.get("intermediate_size") or sizes.tensor)
    if sizes.expert > 1:
        if not experts:
            raise ConfigError(
                f"trainer.expert_parallel: the model has no experts to share over {sizes.expert} ranks",
                key="trainer.expert_parallel",
            )
        yield "trainer.expert_parallel", sizes.expert, "experts", experts


def _experts(model: Mapping[str, Any]) -> int:
    """Experts of a layer; 0 for a dense model."""
    return int(model.get("num_experts") or 0)
