"""Checks of a configuration against this machine: files, model folders, plugins, ports. Imports neither torch nor ray.

`load_config` calls `check_environment`; `miles train` also `check_ports`, since only a run needs them to be free.
"""

from __future__ import annotations

import socket
from importlib.metadata import entry_points

from controllers.errors import ConfigError
from miles.config.base import KeyProblem
from miles.config.schema import ModelConfig, RunConfig
from miles.registry import did_you_mean


def check_environment(config: RunConfig) -> None:
    """Raise KeyProblem, or ConfigError from a model folder, for what the configuration names and is not there."""
    for key, path in (("data.path", config.data.path), ("data.eval_path", config.data.eval_path)):
        if path is not None and not path.is_file():
            raise KeyProblem(key, "there is no such file", str(path))
    transports = {point.name for point in entry_points(group="miles.weight_sync")}
    if config.weight_sync.transport not in transports:
        name = config.weight_sync.transport
        problem = f"unknown transport {name!r}{did_you_mean(name, transports)}"
        raise ConfigError(f"weight_sync.transport: {problem}", key="weight_sync.transport")
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
    # Imported here: they bring numpy, which `import miles.config` does not need.
    if model.path is not None:
        from miles.models.folder import inspect_model_folder

        return inspect_model_folder(model.path).context_length
    from miles.models.presets import preset_shape

    return preset_shape(str(model.preset)).context_length
