"""What a run needs of a trainer. `miles.trainer.megatron` implements it; a person's own trainer can too.

Name the factory of yours as `trainer.backend` (`miles.trainer.registry` has its signature;
`examples/plain_torch_trainer.py` is one). The weight sync plugin reaches a trainer only through `on_each_rank` and
the `RankContext` that functions get there, so any trainer has weight sync without knowing of it.
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
    def rank(self) -> int:
        """From 0 to world_size - 1; the place of this rank's answer in what `on_each_rank` returns."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def plugins(self) -> dict[str, Any]:
        """State that plugins keep in this process between calls, by plugin name. The trainer only keeps the dict."""

    def shards(self) -> Iterator[TensorShard]:
        """Every box of every global tensor this rank holds. The same boxes in the same order at every call.

        Over all ranks the boxes of a tensor cover it, and two boxes are equal or disjoint. A tied output head is left
        out. Shapes, dtypes and devices never change; the memory behind the views may, between two calls.
        """


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
    """A group of trainer ranks, from the entering of its context manager to the leaving.

    Calls may come from several tasks and are carried out one after the other, the same order on every rank. Each has
    a deadline of its own and then raises WaitTimeout; each raises ActorDied when a rank is gone. Cancelling a call
    may leave it running, so the next one waits for it. A call that raised has changed nothing that `steps_done`
    counts.
    """

    @property
    def steps_done(self) -> int:
        """Optimizer steps of reinforcement learning done so far; the warm-up does not count.

        The run reads it to know when it is over, what step a publication is of, and how a checkpoint is called.
        """

    @property
    def incarnation(self) -> int:
        """Rises when rank processes are lost and others take their place: what plugins kept in them is gone.

        Always the same for a trainer whose ranks are never replaced. An `on_each_rank` that lost its ranks raises
        ActorDied after this has risen; the next call reaches the new ones.
        """

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step at learning rate `lr`, on the mean loss of the completions' tokens.

        Called `train.warmup.steps` times before anything else, and never again. `stats.step` counts these steps.
        """

    async def step(self, batch: Batch) -> StepStats:
        """One optimizer step on a batch of groups.

        Called by the training loop with a batch for step `steps_done + 1`, which it must refuse to take for another.
        When it returns, the step is done: `steps_done` equals `stats.step`, and `shards()` shows its weights.
        `stats.metrics` go into `metrics.jsonl` as they are; docs/metrics.md has the names that the displays know.
        """

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """For each (prompt ids, response ids): the trainer's logprob of each response token, temperature applied.

        With the weights as they are, changing nothing; [] for an empty response. For a person's own loop and for
        comparisons with engines: the run itself does not call it.
        """

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in every rank's process, beside no step; results in rank order.

        Called by plugins, weight sync at every publication. Arguments and results must pickle. Raises what the
        function raised; the ranks stay usable then.
        """

    async def save(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint (weights, optimizer, schedule, RNG, steps_done) that is whole or absent.

        Called after the warm-up and every `checkpoint.every` steps, with a folder that does not exist. Returns once it
        is there. A trainer that writes from a copy may call `on_copied` before: other calls are made from then on, and
        what they change must not reach the checkpoint.
        """

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote: what comes next is what would have come next then.

        Weights change in place of what `shards()` shows; the run publishes them afterwards.
        """

    async def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face format (config, tokenizer, safetensors), whole or not at all.

        Called by a person's own loop. Raises ConfigError when `folder` exists and is not empty.
        """
