"""The only place that constructs parts and wires them: configuration in, a running set of parts out.

    watchdog > ray > journal > client > controller > trainer > weight sync > scorer > executor

Each part is entered inside the ones before it and left in the reverse order, so what a part uses outlives it.
Engines begin to launch before the trainer does, since neither waits for the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from controllers.engine_state import Serving, Updating
from controllers.errors import VersionRegression
from controllers.events import EngineStateChanged, Event, VersionPublished
from controllers.inference_controller import InferenceController
from controllers.weight_versions import VersionLedger
from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor
from miles.algorithms.registry import load as load_algorithm
from miles.cluster.ray_cluster import RayCluster
from miles.cluster.watchdog import Watchdog
from miles.config import RunConfig
from miles.data.registry import check_source, open_source
from miles.data.source import DataSource
from miles.engines.launcher import RayEngineLauncher
from miles.engines.sglang_client import SGLangClient
from miles.models.folder import ModelInfo, inspect_model_folder
from miles.models.presets import write_preset
from miles.models.tokenizer import Tokenizer, load_tokenizer
from miles.part_options import (
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
from miles.trainer.megatron import MegatronTrainer
from miles.trainer.protocol import Trainer
from miles.weight_sync.service import WeightSyncService

JOURNAL_FILE = "journal.sqlite"
MODEL_FOLDER = "model"
AVAILABLE_STATES = (Serving.__name__, Updating.__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of, all of it running."""

    inference: InferenceController
    executor: RolloutExecutor
    weight_sync: WeightSyncService
    trainer: Trainer
    data: DataSource
    tokenizer: Tokenizer
    model: ModelInfo


class VersionSteps:
    """Which optimizer step the weights of each published version are from. A sink of the controller's event bus."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def __call__(self, version: int) -> int:
        """Raises VersionRegression for a version that was never published: no token may be newer than that."""
        if version not in self._steps:
            raise VersionRegression(f"tokens of version {version}, which was never published", number=version)
        return self._steps[version]

    def on_event(self, now: float, event: Event) -> None:
        """Take over a publication."""
        if isinstance(event, VersionPublished):
            self._steps[event.version.number] = event.version.step


class ServedSteps:
    """Tells the executor when the weights of a step are in service. A sink of the controller's event bus.

    That is once no available engine serves older ones: were groups admitted at the publication, some would land on
    engines about to be updated, and would be too old by the time they are trained. An engine that lags is waited for
    no longer than until the next publication.
    """

    def __init__(self, controller: InferenceController, version_steps: VersionSteps, executor: RolloutExecutor) -> None:
        self._controller = controller
        self._version_steps = version_steps
        self._executor = executor
        self._told = -1

    def on_event(self, now: float, event: Event) -> None:
        """Take over a change in what engines serve, or a publication."""
        if not isinstance(event, EngineStateChanged | VersionPublished):
            return
        served = [
            self._version_steps(engine.version)
            for engine in self._controller.snapshot()
            if engine.state in AVAILABLE_STATES and engine.version is not None
        ]
        step = -1 if not served else max(served) if isinstance(event, VersionPublished) else min(served)
        if step > self._told:
            self._told = step
            self._executor.on_published(step)


def check_names(config: RunConfig) -> None:
    """Raise the ConfigError of a name or a tokenizer that cannot be loaded, before a run leaves a trace."""
    load_reward(config.reward)
    if ":" in config.data.source:
        check_source(config.data.source)
    load_algorithm("advantage", config.algorithm.advantage)
    if config.model.path is not None:
        load_tokenizer(config.model.path)


@asynccontextmanager
async def assemble(config: RunConfig, recorder: RunRecorder) -> AsyncIterator[Parts]:
    """Start every part; when the block is left, end them all."""
    model_path = config.model.path
    if model_path is None:
        model_path = write_preset(str(config.model.preset), recorder.path / MODEL_FOLDER, seed=config.run.seed)
    model, tokenizer = inspect_model_folder(model_path), load_tokenizer(model_path)
    data, reward = _open_data(config, tokenizer), load_reward(config.reward)
    async with AsyncExitStack() as stack:
        watchdog = stack.enter_context(Watchdog())
        recorder.stage("starting Ray")
        await stack.enter_async_context(RayCluster(ray_options(config), watchdog))
        journal = await stack.enter_async_context(Journal(recorder.path / JOURNAL_FILE))
        client = await stack.enter_async_context(SGLangClient())
        launcher = RayEngineLauncher(launcher_options(config, model_path, recorder.path), client)
        controller = InferenceController(launcher, VersionLedger(journal), fleet_options(config))
        version_steps = VersionSteps()
        controller.bus.add_sink(recorder.on_event)
        controller.bus.add_sink(version_steps.on_event)
        recorder.stage(f"starting {config.engines.count} engines and the trainer")
        await stack.enter_async_context(controller)
        trainer = await stack.enter_async_context(MegatronTrainer(trainer_options(config, model_path)))
        sync_options = weight_sync_options(config, recorder.path)
        weight_sync = await stack.enter_async_context(WeightSyncService(controller, trainer, sync_options))
        scorer_options = ScorerOptions(timeout_s=config.reward_timeout_s)
        scorer = await stack.enter_async_context(Scorer(reward, tokenizer, scorer_options))
        executor = RolloutExecutor(
            controller, client, scorer, journal, rollout_options(config, model, tokenizer), version_steps
        )
        controller.bus.add_sink(ServedSteps(controller, version_steps, executor).on_event)
        recorder.watch(executor)
        await stack.enter_async_context(executor)
        yield Parts(controller, executor, weight_sync, trainer, data, tokenizer, model)


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
