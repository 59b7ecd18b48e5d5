"""Advantage and loss functions by name, or by `package.module:function`. Torch-free until a loss is loaded.

An advantage function maps the valid rewards of one group to as many advantages: (rewards, **options) -> list[float].
A loss function maps per-token tensors to per-token tensors: see `miles.algorithms.losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from controllers.errors import ConfigError
from miles.registry import check_name, resolve

ADVANTAGES: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "miles.algorithms.advantages:grpo",
        "rloo": "miles.algorithms.advantages:rloo",
    }
)
LOSSES: Mapping[str, str] = MappingProxyType({"clipped": "miles.algorithms.losses:clipped"})


_KNOWN = {"advantage": ADVANTAGES, "loss": LOSSES}


def check(kind: str, name: str) -> None:
    """Raise ConfigError for a name that is neither known nor a path; `kind` is `advantage` or `loss`.

    Imports nothing: whether a path leads somewhere shows when it is loaded.
    """
    check_name(f"algorithm.{kind}", name, _KNOWN[kind])


def load(kind: str, name: str) -> Callable[..., Any]:
    """The function behind a name. Raises ConfigError for an unknown one, or when it cannot be imported."""
    check(kind, name)
    found = resolve(f"algorithm.{kind}", _KNOWN[kind].get(name, name), {})
    if not callable(found):
        raise ConfigError(f"algorithm.{kind}: {name!r} is not a function", key=f"algorithm.{kind}")
    return found
