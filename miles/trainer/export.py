"""From a checkpoint to a Hugging Face folder in one process: the ranks' parts are put together on loading.

Holds the model's weights once in host memory, and nothing of the optimizer.
"""

from __future__ import annotations

from pathlib import Path

import torch

from miles.trainer import checkpoint, weights
from miles.trainer.architecture import read_architecture
from miles.trainer.model import build_model
from miles.trainer.process_group import join_alone


def export_checkpoint(folder: Path, model_folder: Path, target: Path, *, dtype: str = "float32") -> None:
    """Write the weights of checkpoint `folder`, with config and tokenizer of `model_folder`, to `target`.

    `dtype` is the one the checkpoint's run trained in. `target` is whole or absent. Raises ConfigError when `target`
    is occupied, or `folder` holds no checkpoint of this model.
    """
    join_alone()
    arch = read_architecture(model_folder)
    model = build_model(arch, dtype=getattr(torch, dtype))
    checkpoint.load_weights(folder, model)
    weights.export_hf(dict(model.named_parameters()), arch, model_folder, target)
