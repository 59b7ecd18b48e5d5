"""Checks of a configuration against this machine: files, model folders, plugins, ports. Imports neither torch nor ray.

`load_config` calls `check_environment`; `miles train` also `check_ports`, since only a run needs them to be free.
The adapters' own checks are imported where they are called, so that `import miles.config` stays light.
"""

from __future__ import annotations

import socket
from importlib.metadata import entry_points
from pathlib import Path

from controllers.errors import ConfigError
from miles.config.algorithm import AlgorithmConfig
from miles.config.base import KeyProblem
from miles.config.schema import DataConfig, RunConfig
from miles.registry import did_you_mean


def check_environment(config: RunConfig) -> None:
    """Raise KeyProblem or ConfigError for what the configuration names and is not there.

    A person's own code (`package.module:function`) is looked for only when a run starts: importing it may take long.
    """
    _check_names(config)
    _check_data(config.data)
    _check_trainer(config)
    if config.debug.replay is not None:
        _check_replay(config.debug.replay)
    context_length = _context_length(config)
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


def _context_length(config: RunConfig) -> int:
    model = config.model
    if model.path is not None:
        from miles.models.folder import inspect_model_folder

        serves = config.engines.kind == "embedded" and config.debug.replay is None
        return inspect_model_folder(model.path, embedded=serves).context_length
    from miles.models.presets import preset_shape

    return preset_shape(str(model.preset)).context_length


def _check_names(config: RunConfig) -> None:
    from miles.rewards.reward import load_reward

    transports = {point.name for point in entry_points(group="miles.weight_sync")}
    transport = config.weight_sync.transport
    if transport not in transports:
        problem = f"unknown transport {transport!r}{did_you_mean(transport, transports)}"
        raise ConfigError(f"weight_sync.transport: {problem}", key="weight_sync.transport")
    _check_algorithm(config.algorithm, config.rollout.max_tokens)
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


def _check_algorithm(algorithm: AlgorithmConfig, max_tokens: int) -> None:
    from miles.algorithms import registry

    registry.check("advantage", algorithm.advantage, algorithm.advantage_options)
    registry.check("loss", algorithm.loss)
    if "clip" in algorithm.loss_options:
        raise KeyProblem("algorithm.loss_options.clip", "is algorithm.clip", algorithm.loss_options["clip"])
    clips = algorithm.loss not in registry.LOSSES or "clip" in registry.option_names("loss", algorithm.loss)
    if algorithm.clip is not None and not clips:
        raise KeyProblem("algorithm.clip", f"the loss {algorithm.loss!r} does not clip", list(algorithm.clip))
    registry.check("loss", algorithm.loss, algorithm.loss_options)
    registry.check("aggregation", algorithm.aggregation)
    if algorithm.kl is not None:
        registry.check("kl", algorithm.kl.estimator)
    if algorithm.correction is not None:
        registry.check("correction", algorithm.correction.name, algorithm.correction.options)
    if algorithm.overlong is not None and algorithm.overlong.buffer > max_tokens:
        problem = f"must be at most rollout.max_tokens ({max_tokens})"
        raise KeyProblem("algorithm.overlong.buffer", problem, algorithm.overlong.buffer)


def _check_replay(folder: Path) -> None:
    from miles.batch_log import logged_steps

    steps = logged_steps(folder)
    if not steps:
        raise KeyProblem("debug.replay", "must be a folder of kept batches, the batches/ of a run", str(folder))
    if steps != list(range(1, len(steps) + 1)):
        raise KeyProblem("debug.replay", "must hold the batches of all steps from 1 on", str(folder))


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
