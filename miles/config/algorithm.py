"""The section about the algorithm: how rewards become a gradient."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from miles.config.base import Section

GROUP_BASELINES = frozenset({"grpo", "rloo"})
"""Advantages whose baseline is made of the other samples of a group."""


class AlgorithmConfig(Section):
    """`algorithm`: what a reward does to the weights."""

    advantage: Annotated[str, Field(min_length=1)] = "grpo"
    """How rewards become advantages: `grpo` subtracts the mean of the group, `rloo` that of the other samples.

    Or `package.module:function`."""

    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage: `scale_by_std` and `eps` of the built-in ones."""

    loss: Annotated[str, Field(min_length=1)] = "clipped"
    """The policy loss: `clipped` bounds the importance ratio token by token. Or `package.module:function`."""

    clip: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0)]], Field(strict=False)] = (
        0.2,
        0.28,
    )
    """How far the ratio may fall below and rise above 1: `[low, high]`."""
