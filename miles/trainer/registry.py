"""`trainer.backend` of the configuration: `megatron`, or the factory of a person's own trainer. Torch-free.

A factory is a function or class, called once when a run starts, in the driver, after Ray is up:

    factory(options: TrainerOptions, folder: Path, **trainer.backend_options) -> AbstractAsyncContextManager[Trainer]

`options.model_path` is the Hugging Face folder to start from, `folder` the run folder, for files of the trainer's own.
Entering the context manager starts the trainer, whose weights are then those of `model_path`; the trainer it yields
is used until the context is left, in whatever way the run ends. Leaving it must end every process it started.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

from controllers.errors import ConfigError
from miles.registry import check_name, resolve
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Trainer

KEY = "trainer.backend"
OPTIONS_KEY = "trainer.backend_options"
MEGATRON = "megatron"

TrainerFactory = Callable[..., AbstractAsyncContextManager[Trainer]]


def check_backend(name: str) -> None:
    """Raise ConfigError for a name that is neither `megatron` nor a path. Imports nothing."""
    check_name(KEY, name, (MEGATRON,))


def load_backend(name: str, backend_options: Mapping[str, Any]) -> TrainerFactory:
    """The factory behind `package.module:function`. Raises ConfigError where it cannot be imported or called so."""
    found = resolve(KEY, name, {})
    if not callable(found):
        raise ConfigError(f"{KEY}: {name!r} is neither a function nor a class", key=KEY)
    if (problem := _misfit(found, {})) is not None and _misfit(found, backend_options) is not None:
        raise ConfigError(f"{KEY}: {name!r} cannot be called with (options, folder): {problem}", key=KEY)
    if (problem := _misfit(found, backend_options)) is not None:
        given = dict(backend_options)
        raise ConfigError(f"{OPTIONS_KEY}: {name!r} does not take {given!r}: {problem}", key=OPTIONS_KEY)
    return cast(TrainerFactory, found)


def _misfit(function: Callable[..., Any], keywords: Mapping[str, Any]) -> str | None:
    """Why a function cannot take two arguments and these keywords; None where it can, or tells nothing of itself."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C
        return None
    try:
        signature.bind(None, None, **keywords)
    except TypeError as error:
        return str(error)
    return None


def open_trainer(
    name: str, options: TrainerOptions, folder: Path, backend_options: Mapping[str, Any]
) -> AbstractAsyncContextManager[Trainer]:
    """Call the factory. Raises ConfigError when it does not make an async context manager."""
    made = load_backend(name, backend_options)(options, folder, **backend_options)
    if not isinstance(made, AbstractAsyncContextManager):
        raise ConfigError(f"{KEY}: {name!r} returned {made!r}, which is no async context manager", key=KEY)
    return made
