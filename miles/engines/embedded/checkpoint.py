"""Weights in a Hugging Face folder: read whole and checked against the model before a live parameter is touched."""

from __future__ import annotations

from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from controllers.errors import ConfigError
from miles.engines.embedded.model import Decoder


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files. Raises ConfigError when there are none or one is broken."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {str(folder)!r} holds no weights (*.safetensors)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"cannot read {str(file)!r}: {error}") from error
    return tensors


def check_weights(model: Decoder, weights: dict[str, Tensor]) -> list[str]:
    """What keeps `weights` (Hugging Face names) from being this model's, whole: a sentence each; empty if nothing."""
    problems = []
    covered: dict[int, int] = {}
    for name, tensor in weights.items():
        try:
            target = model.destination(name)
        except KeyError:
            problems.append(f"{name} is no tensor of this model")
            continue
        if target is None:
            continue
        if target.shape != tensor.shape:
            problems.append(f"{name} has shape {list(tensor.shape)}, the model wants {list(target.shape)}")
            continue
        storage = target.untyped_storage().data_ptr()
        covered[storage] = covered.get(storage, 0) + target.numel()
    for name, parameter in model.named_parameters():
        if covered.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            problems.append(f"{name} is missing, whole or in part")
    return problems


def load_model_weights(model: Decoder, folder: Path) -> None:
    """Fill a new model from a folder. Raises ConfigError naming what does not fit."""
    weights = read_checkpoint(folder)
    problems = check_weights(model, weights)
    if problems:
        raise ConfigError(f"weights in {str(folder)!r} do not fit their config.json: {summary(problems)}")
    with torch.no_grad():
        model.load_weights(weights.items())


def summary(problems: list[str]) -> str:
    """The first few of many problems, in one line."""
    more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
    return "; ".join(problems[:4]) + more
