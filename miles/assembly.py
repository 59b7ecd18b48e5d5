"""The only place that constructs parts and wires them: configuration in, a running set of parts out.

    a run             ray > engines (journal, client, controller) > trainer        > weight sync > scorer > executor
    rollouts alone    ray > engines                               > frozen weights > weight sync > scorer > executor
    a replay          ray > trainer

Each part is entered inside the ones before it and left in the reverse order, so what a part uses outlives it.
Engines begin to launch before the trainer does, since neither waits for the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from controllers.errors import ConfigError
from controllers.inference_controller import InferenceController
from controllers.weight_versions import VersionLedger
from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor
from miles.algorithms.registry import load_all as load_algorithm
from miles.batch_log import BATCHES_FOLDER, BatchLog
from miles.cluster.ray_cluster import RayCluster, gpu_count
from miles.cluster.watchdog import Watchdog
from miles.config import RunConfig
from miles.config.trainer import TrainerConfig
from miles.data.registry import check_source, open_source
from miles.data.source import DataSource
from miles.engines.launcher import RayEngineLauncher
from miles.engines.sglang_client import SGLangClient
from miles.models.folder import ModelInfo, inspect_model_folder
from miles.models.presets import write_preset
from miles.models.tokenizer import Tokenizer, load_tokenizer
from miles.part_options import (
    algorithm_options,
    fault_options,
    fleet_options,
    launcher_options,
    ray_options,
    rollout_options,
    trainer_options,
    weight_sync_options,
)
from miles.recorder import RunRecorder
from miles.rewards.reward import load_reward
from miles.rewards.scorer import Scorer, ScorerOptions
from miles.telemetry.run_folder import MODEL_FOLDER
from miles.trainer.frozen_weights import FrozenWeights
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.protocol import Trainer
from miles.trainer.registry import MEGATRON, load_backend, open_trainer
from miles.version_steps import ServedSteps, VersionSteps
from miles.weight_sync.ports import RankRunner
from miles.weight_sync.service import WeightSyncService

JOURNAL_FILE = "journal.sqlite"


@dataclass(frozen=True, slots=True)
class Material:
    """What every kind of run has: a model's folder, and prompts."""

    model_path: Path
    model: ModelInfo
    tokenizer: Tokenizer
    data: DataSource


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The generating half: engines, what asks them, and what brings them weights."""

    inference: InferenceController
    executor: RolloutExecutor
    weight_sync: WeightSyncService


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of, all of it running."""

    material: Material
    rollouts: Rollouts
    trainer: Trainer
    dump: BatchLog | None
    """Where the run keeps its batches; None where it need not, or the trainer does so itself."""


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What a replay is made of."""

    material: Material
    trainer: Trainer


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What makes rollouts without a trainer."""

    material: Material
    rollouts: Rollouts


def check_names(config: RunConfig) -> None:
    """Raise the ConfigError of a name or a tokenizer that cannot be loaded, before a run leaves a trace."""
    load_reward(config.reward)
    if ":" in config.data.source:
        check_source(config.data.source)
    load_algorithm(algorithm_options(config))
    if config.trainer.backend != MEGATRON:
        load_backend(config.trainer.backend, config.trainer.backend_options)
    if config.model.path is not None:
        load_tokenizer(config.model.path)


@asynccontextmanager
async def assemble(config: RunConfig, recorder: RunRecorder) -> AsyncIterator[Parts]:
    """Start every part; when the block is left, end them all."""
    material = _material(config, recorder.path)
    async with AsyncExitStack() as stack:
        await _start_ray(stack, config, recorder)
        _check_gpus(config.trainer)
        engines = await _start_engines(stack, config, recorder, material)
        trainer = await _start_trainer(stack, config, recorder, material)
        rollouts = await _start_rollouts(stack, config, recorder, material, engines, trainer)
        # Megatron's trainer keeps batches itself, in the same place: it trains them again when ranks are lost.
        dumps = config.debug.dump_batches and config.trainer.backend != MEGATRON
        dump = BatchLog(recorder.path / BATCHES_FOLDER, keep=True) if dumps else None
        yield Parts(material, rollouts, trainer, dump)


@asynccontextmanager
async def assemble_training(config: RunConfig, recorder: RunRecorder) -> AsyncIterator[TrainingParts]:
    """Start a trainer alone."""
    material = _material(config, recorder.path)
    async with AsyncExitStack() as stack:
        await _start_ray(stack, config, recorder)
        _check_gpus(config.trainer)
        yield TrainingParts(material, await _start_trainer(stack, config, recorder, material))


@asynccontextmanager
async def assemble_rollouts(config: RunConfig, recorder: RunRecorder) -> AsyncIterator[RolloutParts]:
    """Start everything but a trainer, in whose place the weights of the model's folder are published."""
    material = _material(config, recorder.path)
    async with AsyncExitStack() as stack:
        await _start_ray(stack, config, recorder)
        engines = await _start_engines(stack, config, recorder, material)
        weights = await stack.enter_async_context(FrozenWeights(trainer_options(config, material.model_path)))
        rollouts = await _start_rollouts(stack, config, recorder, material, engines, weights, paced=False)
        yield RolloutParts(material, rollouts)


@dataclass(frozen=True, slots=True)
class _Engines:
    """A fleet that is launching, and what requests to it and its weights go through."""

    controller: InferenceController
    client: SGLangClient
    journal: Journal
    version_steps: VersionSteps


def _material(config: RunConfig, folder: Path) -> Material:
    path = config.model.path
    if path is None:
        path = write_preset(str(config.model.preset), folder / MODEL_FOLDER, seed=config.run.seed)
    model, tokenizer = inspect_model_folder(path), load_tokenizer(path)
    return Material(path, model, tokenizer, _open_data(config, tokenizer))


async def _start_ray(stack: AsyncExitStack, config: RunConfig, recorder: RunRecorder) -> None:
    watchdog = stack.enter_context(Watchdog())
    recorder.stage("starting Ray")
    await stack.enter_async_context(RayCluster(ray_options(config), watchdog))


def _check_gpus(trainer: TrainerConfig) -> None:
    """Raise ConfigError where ranks would wait for GPUs that Ray does not have."""
    ranks, gpus = trainer.parallel_sizes().world_size, gpu_count()
    if trainer.backend == MEGATRON and trainer.device == "cuda" and ranks > gpus:
        problem = f"{ranks} trainer ranks need a GPU each, and Ray has {gpus:g}"
        raise ConfigError(f"trainer.device: {problem}, got {trainer.device!r}", key="trainer.device")


async def _start_engines(
    stack: AsyncExitStack, config: RunConfig, recorder: RunRecorder, material: Material
) -> _Engines:
    journal = await stack.enter_async_context(Journal(recorder.path / JOURNAL_FILE))
    client = await stack.enter_async_context(SGLangClient())
    launcher = RayEngineLauncher(launcher_options(config, material.model_path, recorder.path), client)
    controller = InferenceController(launcher, VersionLedger(journal), fleet_options(config))
    version_steps = VersionSteps()
    controller.bus.add_sink(recorder.on_event)
    controller.bus.add_sink(version_steps.on_event)
    recorder.stage(f"starting {config.engines.count} engines")
    await stack.enter_async_context(controller)
    return _Engines(controller, client, journal, version_steps)


async def _start_trainer(
    stack: AsyncExitStack, config: RunConfig, recorder: RunRecorder, material: Material
) -> Trainer:
    options, backend = trainer_options(config, material.model_path), config.trainer.backend
    recorder.stage("starting the trainer")
    if backend == MEGATRON:
        faults = fault_options(config, recorder.path)
        trainer = MegatronTrainer(options, faults=faults, on_event=recorder.happened)
        return await stack.enter_async_context(trainer)
    own = open_trainer(backend, options, recorder.path.resolve(), config.trainer.backend_options)
    return await stack.enter_async_context(own)


async def _start_rollouts(
    stack: AsyncExitStack,
    config: RunConfig,
    recorder: RunRecorder,
    material: Material,
    engines: _Engines,
    ranks: RankRunner,
    *,
    paced: bool = True,
) -> Rollouts:
    """`ranks` hold the weights that are published. Unless it is `paced` by a trainer, no group is ever too old."""
    controller, version_steps = engines.controller, engines.version_steps
    sync_options = weight_sync_options(config, recorder.path)
    weight_sync = await stack.enter_async_context(WeightSyncService(controller, ranks, sync_options))
    scorer_options = ScorerOptions(timeout_s=config.reward_timeout_s)
    scorer = Scorer(load_reward(config.reward), material.tokenizer, scorer_options)
    await stack.enter_async_context(scorer)
    options = rollout_options(config, material.model, material.tokenizer)
    if not paced:
        options = replace(options, max_staleness=None)
    executor = RolloutExecutor(controller, engines.client, scorer, engines.journal, options, version_steps)
    controller.bus.add_sink(ServedSteps(controller, version_steps, executor).on_event)
    recorder.watch(executor)
    await stack.enter_async_context(executor)
    return Rollouts(controller, executor, weight_sync)


def _open_data(config: RunConfig, tokenizer: Tokenizer) -> DataSource:
    data = config.data
    return open_source(
        data.source,
        tokenizer=tokenizer,
        seed=config.run.seed,
        path=data.path,
        prompt_key=data.prompt_key,
        label_key=data.label_key,
        eval_path=data.eval_path,
        eval_fraction=data.eval_fraction,
        options=data.options,
    )
