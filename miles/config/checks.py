"""Checks of a configuration against this machine: files, model folders, plugins, ports. Imports neither torch nor ray.

`load_config` calls `check_environment`; `miles train` also `check_ports`, since only a run needs them to be free.
The adapters' own checks are imported where they are called, so that `import miles.config` stays light.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from controllers.errors import ConfigError
from miles.config.base import KeyProblem
from miles.config.schema import DataConfig, ModelConfig, RunConfig
from miles.registry import did_you_mean


def check_environment(config: RunConfig) -> None:
    """Raise KeyProblem or ConfigError for what the configuration names and is not there.

    A person's own code (`package.module:function`) is looked for only when a run starts: importing it may take long.
    """
    _check_names(config)
    _check_data(config.data)
    _check_trainer(config)
    context_length = _context_length(config.model)
    if config.rollout.max_tokens >= context_length:
        raise KeyProblem(
            "rollout.max_tokens",
            f"must leave room for a prompt in the model's context of {context_length} tokens",
            config.rollout.max_tokens,
        )


def check_ports(config: RunConfig, host: str = "127.0.0.1") -> None:
    """Raise ConfigError if a port that `engines.port` asks for is in use."""
    if config.engines.port is None:
        return
    for port in range(config.engines.port, config.engines.port + config.engines.count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As servers do: a port in TIME_WAIT is free, one that is listened on is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(f"engines.port: {host}:{port} is taken ({error.strerror})", port=port) from error


def _context_length(model: ModelConfig) -> int:
    if model.path is not None:
        from miles.models.folder import inspect_model_folder

        return inspect_model_folder(model.path).context_length
    from miles.models.presets import preset_shape

    return preset_shape(str(model.preset)).context_length


def _check_names(config: RunConfig) -> None:
    from miles.algorithms import registry as algorithms
    from miles.rewards.reward import load_reward

    transports = {point.name for point in entry_points(group="miles.weight_sync")}
    transport = config.weight_sync.transport
    if transport not in transports:
        problem = f"unknown transport {transport!r}{did_you_mean(transport, transports)}"
        raise ConfigError(f"weight_sync.transport: {problem}", key="weight_sync.transport")
    algorithms.check("advantage", config.algorithm.advantage)
    if config.algorithm.advantage in algorithms.ADVANTAGES:
        _check_arguments(algorithms.load("advantage", config.algorithm.advantage), config.algorithm.advantage_options)
    algorithms.check("loss", config.algorithm.loss)
    if ":" not in config.reward:
        load_reward(config.reward)


def _check_trainer(config: RunConfig) -> None:
    from miles.models.folder import read_config
    from miles.models.presets import preset_shape
    from miles.trainer.model_cut import check_cut
    from miles.trainer.registry import MEGATRON, check_backend

    check_backend(config.trainer.backend)
    sizes = config.trainer.parallel_sizes()
    if config.trainer.backend == MEGATRON:
        path = config.model.path
        check_cut(read_config(path) if path is not None else preset_shape(str(config.model.preset)).config(), sizes)


def _check_arguments(advantage: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(advantage).parameters.values())
    known = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            key = f"algorithm.advantage_options.{name}"
            raise ConfigError(f"{key}: unknown key{did_you_mean(name, known)}", key=key)


def _check_data(data: DataConfig) -> None:
    from miles.data.registry import check_source

    if ":" in data.source:
        return
    check_source(
        data.source,
        path=data.path,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        eval_path=data.eval_path,
        eval_fraction=data.eval_fraction,
        options=data.options,
    )
