"""Advantage and loss functions by name, or by `package.module:function`. Torch-free until a loss is loaded.

An advantage function maps the valid rewards of one group to as many advantages: (rewards, **options) -> list[float].
A loss function maps per-token tensors to per-token tensors: see `miles.algorithms.losses`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from controllers.errors import ConfigError

ADVANTAGES: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "miles.algorithms.advantages:grpo",
        "rloo": "miles.algorithms.advantages:rloo",
    }
)
LOSSES: Mapping[str, str] = MappingProxyType({"clipped": "miles.algorithms.losses:clipped"})


def resolve(kind: str, name: str) -> str:
    """The `module:function` path behind a name; `kind` is `advantage` or `loss`. Imports nothing.

    Raises ConfigError for a name that is neither known nor a path, with the nearest known one.
    """
    known = {"advantage": ADVANTAGES, "loss": LOSSES}[kind]
    if name in known:
        return known[name]
    module, separator, function = name.partition(":")
    if separator and module and function:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"algorithm.{kind} {name!r} is none of {', '.join(known)} and not package.module:function{hint}",
        key=f"algorithm.{kind}",
    )


def load(kind: str, name: str) -> Callable[..., Any]:
    """The function behind a name. Raises ConfigError when it cannot be imported."""
    module, _, attribute = resolve(kind, name).partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.{kind} {name!r} cannot be imported: {error}", key=f"algorithm.{kind}") from error
    if not callable(function):
        raise ConfigError(f"algorithm.{kind} {name!r} is not a function", key=f"algorithm.{kind}")
    result: Callable[..., Any] = function
    return result
