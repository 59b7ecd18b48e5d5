"""The sections about the course of a run: train, eval, checkpoint and debug."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from miles.config.base import Count, FilePath, PositiveInt, Section


class WarmupConfig(Section):
    """`train.warmup`: supervised steps on labels, before the first rollout."""

    steps: Count = 0
    """Supervised steps; 0 leaves the stage out."""

    examples_per_step: PositiveInt = 64
    """Examples of one such step."""

    lr: Annotated[float, Field(gt=0)] = 1.0e-3
    """Learning rate of these steps."""


class TrainConfig(Section):
    """`train`: how long, and in what portions."""

    steps: PositiveInt
    """Optimizer steps of reinforcement learning."""

    groups_per_step: PositiveInt = 16
    """Groups (prompts) of one step."""

    warmup: WarmupConfig = WarmupConfig()
    """The supervised stage before."""


class EvalConfig(Section):
    """`eval`: greedy answers to held-out prompts."""

    every: Count = 50
    """Steps between two evaluations; the first is before step 1 and the last after the last. 0 never."""

    prompts: PositiveInt = 200
    """Held-out prompts of one evaluation."""


class CheckpointConfig(Section):
    """`checkpoint`: what survives the run."""

    every: Count = 50
    """Steps between two checkpoints, besides the one after the warm-up and, unless this is 0, the last step's."""

    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""

    keep_every: Count = 0
    """Checkpoints of steps that this divides are kept for good, besides the newest ones. 0: none."""

    asynchronous: bool = True
    """Training goes on while a checkpoint is written; it waits only for the copy, in host memory, that is written."""


class DebugConfig(Section):
    """`debug`: one half of a run without the other, and what passes between the two."""

    dump_batches: bool = False
    """Keep every batch that was trained, as `batches/` in the run folder."""

    replay: FilePath | None = None
    """Train on the batches of this `batches/` folder, in order, without engines. The warm-up is done as ever."""

    rollout_only: bool = False
    """No trainer: engines serve the weights of the model's folder, and `train.steps` batches are scored and kept.

    Warm-up, evaluations and checkpoints are left out."""
