"""What a run needs of a trainer. `miles.trainer.megatron` implements it; a person's own trainer can too.

The weight sync plugin reaches a trainer only through `on_each_rank`, so any trainer gets weight sync for free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from executors.trajectory import Batch

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One box of one global tensor, as it lies in this rank's memory.

    `name` and `global_shape` are those of the Hugging Face checkpoint. `box` is (start, length) per dimension.
    `tensor` is a live view with shape `[length, ...]`; it need not be contiguous. A fused parameter (qkv, gate_up)
    appears as several shards of the global tensors it holds; replicas of one box may appear on several ranks.
    """

    name: str
    global_shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor


class RankContext(Protocol):
    """What a function sent to every rank sees, in that rank's process."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def plugins(self) -> dict[str, Any]:
        """State that plugins keep in this process between calls, by plugin name."""

    def shards(self) -> Iterator[TensorShard]:
        """Every box of every global tensor this rank holds. The same boxes in the same order at every call."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step. `metrics` are means over trained tokens unless named otherwise; seconds end in `_s`."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised example: the loss is on `completion_ids` only."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


class Trainer(Protocol):
    """A group of trainer ranks. Calls are made one after the other; each has a deadline of its own."""

    @property
    def steps_done(self) -> int:
        """Optimizer steps of reinforcement learning done so far; the warm-up does not count."""

    @property
    def incarnation(self) -> int:
        """Rises when rank processes are lost and others take their place: what plugins kept in them is gone.

        Always the same for a trainer whose ranks are never replaced. An `on_each_rank` that lost its ranks raises
        ActorDied after this has risen; the next call reaches the new ones.
        """

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step at learning rate `lr`."""

    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step on a batch of groups. Raises ActorDied when a rank is gone."""

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """For each (prompt ids, response ids): the trainer's logprob of each response token, temperature applied."""

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in every rank's process; results in rank order. Arguments must pickle."""

    async def save(self, folder: Path) -> None:
        """Write a checkpoint (weights, optimizer, schedule, RNG, step) that is whole or absent."""

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format (config, tokenizer, safetensors)."""
