"""Names in the configuration that stand for code: a built-in's name, or `package.module:function`.

Data sources, rewards, advantages and losses look theirs up here, so that all report a wrong one in the same words.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from controllers.errors import ConfigError

T = TypeVar("T")

_FEW = 10


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name: the nearest known one, or all if they are few."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= _FEW else ""


def resolve(key: str, name: str, builtin: Mapping[str, T]) -> T | object:
    """The object that the configuration key `key` names: one of `builtin`, or what `package.module:attribute` holds.

    Raises ConfigError, naming `key` and quoting `name`, when there is none, or when importing its module fails.
    """
    check_name(key, name, builtin)
    return builtin[name] if name in builtin else _import_attribute(key, name)


def check_name(key: str, name: str, builtin: Collection[str]) -> None:
    """Raise the ConfigError of `resolve` for a name that is neither built-in nor a path, without importing anything."""
    if name in builtin:
        return
    if ":" not in name:
        hint = did_you_mean(name, builtin)
        raise ConfigError(f"{key}: unknown name {name!r}{hint} (or package.module:function)", key=key)
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for path in (module_name, attribute) for part in path.split(".")):
        raise ConfigError(f"{key}: {name!r} is not of the form package.module:function", key=key)


def _import_attribute(key: str, name: str) -> object:
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        # The console script does not look there, and a person's reward lies next to their config. Last, so that no
        # file of theirs takes the place of an installed module.
        sys.path.append(os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # a person's module may raise anything; it is a fault of their key
        detail = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key}: {name!r}: cannot import {module_name!r} ({detail})", key=key) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, (known for known in dir(found) if not known.startswith("_")))
            raise ConfigError(f"{key}: {name!r}: {module_name!r} has no {part!r}{hint}", key=key)
        found = getattr(found, part)
    return found
