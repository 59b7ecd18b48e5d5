"""Advantages, losses, aggregations, KL estimators and corrections by name, or by `package.module:function`.

Built-in modules use tensors by their methods only, so looking one up imports no torch, and `miles check` can hold the
options in a configuration against the keyword arguments of the function they are for. A person's own function is
looked up when a run starts. What each kind of function takes and returns is said in the package it lies in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from controllers.errors import ConfigError
from miles.algorithms.options import AlgorithmOptions
from miles.registry import check_name, did_you_mean, resolve

Kind = Literal["advantage", "loss", "aggregation", "kl", "correction"]


def _table(package: str, *names: str) -> Mapping[str, str]:
    return MappingProxyType({name: f"miles.algorithms.{package}.{name}:{name}" for name in names})


ADVANTAGES = _table("advantages", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
LOSSES = _table("losses", "clipped", "gspo", "cispo", "reinforce", "supervised")
AGGREGATIONS = _table("aggregations", "token_mean", "group_token_mean", "sequence_mean", "sequence_sum")
KL_ESTIMATORS = _table("kl", "k1", "k2", "k3")
CORRECTIONS = _table("corrections", "tis", "mis", "icepop", "decoupled")

BUILT_IN: Mapping[Kind, Mapping[str, str]] = MappingProxyType(
    {
        "advantage": ADVANTAGES,
        "loss": LOSSES,
        "aggregation": AGGREGATIONS,
        "kl": KL_ESTIMATORS,
        "correction": CORRECTIONS,
    }
)
_KEYS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        "advantage": ("algorithm.advantage", "algorithm.advantage_options"),
        "loss": ("algorithm.loss", "algorithm.loss_options"),
        "aggregation": ("algorithm.aggregation", "algorithm.aggregation"),
        "kl": ("algorithm.kl.estimator", "algorithm.kl"),
        "correction": ("algorithm.correction.name", "algorithm.correction.options"),
    }
)
"""Where the configuration has the name and the options of each kind."""

_TENSORS = {"Tensor": object}
"""Names that annotations use and only a type checker imports."""


def check(kind: Kind, name: str, options: Mapping[str, object] = MappingProxyType({})) -> None:
    """Raise ConfigError for a name that is neither built in nor a path, or for options that a built-in does not take.

    A path is not followed: whether it leads somewhere shows when it is loaded.
    """
    check_name(_KEYS[kind][0], name, BUILT_IN[kind])
    if name in BUILT_IN[kind]:
        load(kind, name, options)


def option_names(kind: Kind, name: str) -> frozenset[str]:
    """The options of a built-in function."""
    return frozenset(_keywords(_find(kind, name)))


def load(kind: Kind, name: str, options: Mapping[str, object] = MappingProxyType({})) -> Callable[..., Any]:
    """The function behind a name, with its options filled in.

    Raises ConfigError for an unknown name or option, or when it cannot be imported.
    """
    check_name(_KEYS[kind][0], name, BUILT_IN[kind])
    function = _find(kind, name)
    if not options:
        return function
    key = _KEYS[kind][1]
    _check_names(function, options, key)
    return partial(function, **(_checked_values(function, options, key) if name in BUILT_IN[kind] else options))


def load_all(options: AlgorithmOptions) -> None:
    """Raise the ConfigError of any function that `options` name and that cannot be loaded."""
    load("advantage", options.advantage, options.advantage_options)
    load("loss", options.loss, options.loss_options)
    load("aggregation", options.aggregation)
    if options.kl is not None:
        load("kl", options.kl.estimator)
    if options.correction is not None:
        load("correction", options.correction.name, options.correction.options)


def _find(kind: Kind, name: str) -> Callable[..., Any]:
    key = _KEYS[kind][0]
    found = resolve(key, BUILT_IN[kind].get(name, name), {})
    if not callable(found):
        raise ConfigError(f"{key}: {name!r} is not a function", key=key)
    return found


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: one for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}


def _check_names(function: Callable[..., Any], options: Mapping[str, object], key: str) -> None:
    known = _keywords(function)
    kinds = [one.kind for one in inspect.signature(function).parameters.values()]
    unknown = [] if inspect.Parameter.VAR_KEYWORD in kinds else [name for name in options if name not in known]
    for name in unknown:
        hint = did_you_mean(name, known)
        raise ConfigError(f"{key}.{name}: unknown key{hint} (value {options[name]!r})", key=f"{key}.{name}")


def _checked_values(function: Callable[..., Any], options: Mapping[str, object], key: str) -> dict[str, object]:
    hints = get_type_hints(function, localns=_TENSORS, include_extras=True)
    values: dict[str, object] = {}
    for name, value in options.items():
        given = tuple(value) if isinstance(value, list) else value
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(given, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].replace("Input should", "must")
            raise ConfigError(f"{key}.{name}: {problem}, got {value!r}", key=f"{key}.{name}") from error
    bounds: dict[str, Any] = {name: one.default for name, one in _keywords(function).items()}
    bounds |= values
    if {"low", "high"} <= set(bounds) and bounds["low"] > bounds["high"]:
        problem = f"must be at most {key}.high ({bounds['high']:g})"
        raise ConfigError(f"{key}.low: {problem}, got {bounds['low']:g}", key=f"{key}.low")
    return values
