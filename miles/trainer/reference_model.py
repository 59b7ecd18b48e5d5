"""The weights that a KL penalty is measured from: those of one moment, kept in host memory.

Memory for one parameter more is all it takes on the device: `in_place` swaps them with the live ones and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class ReferenceModel:
    """A copy of a model's present parameters; `weights` is what a checkpoint holds of it."""

    def __init__(self, model: Any) -> None:
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()
        }
        """Parameter name -> tensor of its shape, on the CPU. Not the reference's inside `in_place`."""

    @contextmanager
    def in_place(self, model: Any) -> Iterator[None]:
        """Inside, `model` computes with the reference's weights; views of its parameters see them too."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            kept = self.weights[name]
            live = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(live)
