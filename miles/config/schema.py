"""The YAML of a run as one frozen model, and the checks that involve several of its keys.

Nothing here looks at the file system or the network: `miles.config.checks` does. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from miles.config.algorithm import GROUP_BASELINES, AlgorithmConfig
from miles.config.base import FilePath, KeyProblem, Seconds, Section
from miles.config.fleet import ClusterConfig, EnginesConfig, InferenceConfig, RolloutConfig, WeightSyncConfig
from miles.config.learning import CheckpointConfig, DebugConfig, EvalConfig, TrainConfig
from miles.config.trainer import TrainerConfig


class RunSection(Section):
    """`run`: what this run is called and where it leaves its files."""

    name: Annotated[str, Field(min_length=1)] = "run"
    """Shown in the progress display and the plot."""

    dir: FilePath = Path("runs/run")
    """The run folder; it must be empty or absent. Without the key it is `runs/` and the name."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the model's first weights, the order of prompts and the warm-up."""

    @model_validator(mode="before")
    @classmethod
    def _dir_follows_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and "dir" not in data and isinstance(data.get("name"), str):
            return {**data, "dir": f"runs/{data['name']}"}
        return data


class ModelConfig(Section):
    """`model`: what is trained. `path` wins over `preset`."""

    path: FilePath | None = None
    """A folder in Hugging Face format (config, tokenizer, safetensors)."""

    preset: str | None = "tiny-qwen3"
    """A small model that is made on the spot, with random weights and a byte-level tokenizer."""


class DataConfig(Section):
    """`data`: where prompts come from."""

    source: Annotated[str, Field(min_length=1)]
    """`sort_digits` (made on the spot), `jsonl` (a file of yours), or `package.module:function`."""

    path: FilePath | None = None
    """The file of the `jsonl` source: one JSON object a line."""

    prompt_key: Annotated[str, Field(min_length=1)] = "prompt"
    """The field of a line that holds the prompt."""

    label_key: Annotated[str, Field(min_length=1)] = "label"
    """The field of a line that holds the right answer."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the source, such as `digits` of `sort_digits`."""

    eval_path: FilePath | None = None
    """A file of held-out prompts for the `jsonl` source."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Without `eval_path`, the fraction of the lines of `path` that is held out."""


class TelemetryConfig(Section):
    """`telemetry`: what is shown and logged."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` draws a display, `plain` prints lines; `auto` is live on a terminal and plain elsewhere."""

    plot: bool = True
    """Draw `curves.png` at the end of a run."""


class RunConfig(Section):
    """One run. Made by `miles.config.load_config`, and passed on in parts."""

    run: RunSection = RunSection()
    """Name, folder and seed."""

    model: ModelConfig = ModelConfig()
    """What is trained."""

    data: DataConfig
    """Where prompts come from."""

    reward: Annotated[str, Field(min_length=1)] = "exact_match"
    """`exact_match`, `boxed_math`, or `package.module:function`, called with prompt, response and label."""

    reward_timeout_s: Seconds = 30.0
    """How long one call of the reward function may take; a slower one counts as an abstention."""

    engines: EnginesConfig = EnginesConfig()
    """The processes that generate."""

    inference: InferenceConfig = InferenceConfig()
    """Restarts on purpose."""

    rollout: RolloutConfig = RolloutConfig()
    """How samples are made."""

    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights get into engines."""

    trainer: TrainerConfig = TrainerConfig()
    """The ranks that learn."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What a reward does to the weights."""

    train: TrainConfig
    """How long, and in what portions."""

    eval: EvalConfig = EvalConfig()
    """Greedy answers to held-out prompts."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """What survives the run."""

    debug: DebugConfig = DebugConfig()
    """One half of a run without the other."""

    cluster: ClusterConfig = ClusterConfig()
    """Ray."""

    telemetry: TelemetryConfig = TelemetryConfig()
    """What is shown and logged."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> RunConfig:
        for problem in _cross_check(self):
            raise problem
        return self


def _cross_check(config: RunConfig) -> Iterator[KeyProblem]:
    """Yield what is impossible in combination; each problem names the key that most likely is to be changed."""
    model, data, engines = config.model, config.data, config.engines
    inference, rollout = config.inference, config.rollout
    if model.path is None and model.preset is None:
        yield KeyProblem("model.preset", "either model.path or model.preset must be set", None)
    if data.source == "jsonl" and data.path is None:
        yield KeyProblem("data.path", "the source 'jsonl' needs a file", None)
    if rollout.group_size == 1 and config.algorithm.advantage in GROUP_BASELINES:
        yield KeyProblem(
            "rollout.group_size", f"advantage {config.algorithm.advantage!r} compares samples, so at least 2 a group", 1
        )
    if rollout.sampling_mask and rollout.top_p == 1.0 and rollout.top_k == -1:
        yield KeyProblem("rollout.sampling_mask", "without rollout.top_p or rollout.top_k every token is kept", True)
    if rollout.routing_replay and engines.kind == "embedded":
        yield KeyProblem("rollout.routing_replay", "the embedded engine tells no experts", True)
    if config.trainer.dtype == "bfloat16" and config.trainer.device == "cpu":
        yield KeyProblem("trainer.dtype", "needs trainer.device: cuda", config.trainer.dtype)
    if config.trainer.recompute and config.trainer.device == "cpu":
        yield KeyProblem("trainer.recompute", "needs trainer.device: cuda", True)
    if config.trainer.backend_options and config.trainer.backend == "megatron":
        yield KeyProblem("trainer.backend_options", "'megatron' has none", config.trainer.backend_options)
    yield from _without_effect(config)
    if config.debug.rollout_only and config.debug.replay is not None:
        yield KeyProblem("debug.rollout_only", "there is nothing to generate where debug.replay is set", True)
    if engines.port is not None and engines.port + engines.count - 1 > 65535:
        yield KeyProblem("engines.port", f"{engines.count} engines need ports up to 65535", engines.port)
    if (
        inference.rolling_restart_at_step is not None
        and engines.count > 1
        and inference.max_unavailable >= engines.count
    ):
        yield KeyProblem(
            "inference.max_unavailable",
            f"must be below engines.count ({engines.count}) so that some engine serves in a rolling restart",
            inference.max_unavailable,
        )
    max_updating = config.weight_sync.max_updating
    if max_updating is not None and max_updating > engines.count:
        yield KeyProblem(
            "weight_sync.max_updating", f"must be at most engines.count ({engines.count}), or null", max_updating
        )


def _without_effect(config: RunConfig) -> Iterator[KeyProblem]:
    """Options that differ from their defaults, and that nothing would read."""
    algorithm, trainer = config.algorithm, config.trainer
    if algorithm.loss == "supervised":
        if algorithm.kl is not None and algorithm.kl.place == "reward":
            yield KeyProblem("algorithm.kl.place", "the loss 'supervised' looks at no reward", algorithm.kl.place)
        if algorithm.advantage_options:
            problem = "the loss 'supervised' looks at no advantage"
            yield KeyProblem("algorithm.advantage_options", problem, algorithm.advantage_options)
    if trainer.backend != "megatron":
        for key in ("rebuilds", "bad_steps", "max_bad_steps_in_a_row"):
            if getattr(trainer, key) != TrainerConfig.model_fields[key].default:
                yield KeyProblem(f"trainer.{key}", "only 'megatron' has it", getattr(trainer, key))
