"""What `reward` in the configuration names: a built-in, or a person's own `package.module:function`.

A reward is `f(prompt, response, label, **extra) -> float | None`, plain or `async`; None abstains. `extra` are the
other fields of the prompt's row, as far as the function takes them. `miles check` calls `load_reward` for a built-in
name only, the assembly and every reward worker for any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from controllers.errors import ConfigError
from miles.registry import resolve
from miles.rewards.boxed_math import boxed_math
from miles.rewards.exact_match import exact_match

RewardFunction = Callable[..., object]


class Place(Enum):
    """Where a reward function runs."""

    INLINE = auto()
    """On the event loop: ours, and quick."""
    LOOP = auto()
    """On the event loop, awaited: a coroutine function, which is expected to wait rather than to compute."""
    PROCESS = auto()
    """In a worker process: a person's plain function, which may take its time, hang, or want the main thread."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that was found. `name` finds it again in another process."""

    name: str
    function: RewardFunction
    place: Place

    def call(self, prompt: str, response: str, label: str, extra: Mapping[str, Any]) -> object:
        """Call it, with those of `extra` that it takes."""
        return self.function(prompt, response, label, **_accepted(self.function, extra))


BUILTIN_REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match, "boxed_math": boxed_math}


def load_reward(name: str) -> Reward:
    """Find a reward. Raises ConfigError, naming `reward` and quoting `name`, where there is none that can be called."""
    function = resolve("reward", name, BUILTIN_REWARDS)
    if not callable(function):
        raise ConfigError(f"reward: {name!r} is not a function", key="reward")
    if name in BUILTIN_REWARDS:
        return Reward(name, function, Place.INLINE)
    try:
        inspect.signature(function).bind_partial("prompt", "response", "label")
    except TypeError as error:
        wanted = "(prompt, response, label, **extra)"
        raise ConfigError(f"reward: {name!r} cannot be called as f{wanted}: {error}", key="reward") from error
    except ValueError:  # a function of an extension module may have no signature to look at
        pass
    return Reward(name, function, Place.LOOP if _is_coroutine_function(function) else Place.PROCESS)


def _is_coroutine_function(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _accepted(function: RewardFunction, extra: Mapping[str, Any]) -> dict[str, Any]:
    if not extra:
        return {}
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = {parameter.name for parameter in [p for p in parameters if p.kind in positional][:3]}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return {name: value for name, value in extra.items() if name not in taken}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name} - taken
    return {name: value for name, value in extra.items() if name in names}
