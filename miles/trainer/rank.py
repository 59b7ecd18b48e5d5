"""`TrainerRank`: one trainer rank as a Ray actor. Torch and Megatron are imported only inside its process.

It is also the RankContext that functions sent by `on_each_rank` see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.trajectory import Batch
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, StepStats, TensorShard

if TYPE_CHECKING:
    from miles.trainer.learner import Learner


class TrainerRank:
    """Holds the learner and the plugins' state. Calls come one at a time; call `open` first."""

    def __init__(self, options: TrainerOptions, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._plugins: dict[str, Any] = {}
        self._store: Any = None
        self._opened: Learner | None = None

    def watch(self) -> None:
        """Never returns, so that whoever waits for it hears of this process's end. In a thread of its own."""
        threading.Event().wait()

    def rendezvous(self) -> str:
        """Rank 0's first call: host the meeting point of all ranks; its address, for `open`."""
        from miles.trainer.cpu_compat import import_megatron

        import_megatron()
        from miles.trainer.process_group import host_rendezvous

        self._store, address = host_rendezvous(self._options.start_timeout_s)
        return address

    def open(self, rendezvous: str) -> None:
        """Join the process group and load the model. Raises ConfigError for a model that cannot be loaded."""
        from miles.trainer.cpu_compat import import_megatron

        import_megatron()
        import torch

        from miles.trainer.learner import Learner
        from miles.trainer.process_group import connect_rendezvous, join

        options = self._options
        torch.set_num_threads(options.threads)
        if self._store is None:
            self._store = connect_rendezvous(rendezvous, options.start_timeout_s)
        join(
            self._rank,
            options.parallel,
            self._store,
            rendezvous,
            device=options.device,
            join_timeout_s=options.start_timeout_s,
            call_timeout_s=options.call_timeout_s,
        )
        self._opened = Learner(options)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._options.world_size

    @property
    def plugins(self) -> dict[str, Any]:
        """State that plugins keep here between calls, by plugin name."""
        return self._plugins

    def shards(self) -> Iterator[TensorShard]:
        """Live views of this rank's parameters; see RankContext."""
        return self._learner.shards()

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`function(self, *args, **kwargs)`: the rank's end of `on_each_rank`."""
        return function(self, *args, **kwargs)

    def step(self, batch: Batch) -> StepStats:
        """One RL step."""
        return self._learner.step(batch)

    def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step."""
        return self._learner.warmup_step(examples, lr)

    def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Logprobs of response tokens."""
        return self._learner.logprobs(sequences)

    def begin_save(self, folder: Path) -> None:
        """Copy what a checkpoint holds; a thread begins to write it."""
        self._learner.begin_save(folder)

    def finish_save(self) -> None:
        """Return once the checkpoint begun last is in its place. In a thread of its own, beside other calls."""
        self._learner.finish_save()

    def load(self, folder: Path) -> int:
        """Restore a checkpoint; the number of RL steps done."""
        self._learner.load(folder)
        return self._learner.counters.steps

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self._learner.export(folder)

    @property
    def _learner(self) -> Learner:
        if self._opened is None:
            raise RuntimeError("the trainer rank has not been opened")
        return self._opened
