"""Ranks without torch: real processes under Ray that start in a moment, whose "weights" are one number.

The number depends on every update and on their order, so a lost, a repeated or a swapped update shows.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controllers.errors import ConfigError
from executors.trajectory import Batch
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, StepStats

MODULUS = 2**61 - 1


class ToyRank:
    """The methods of TrainerRank. `run_function(function, ...)` sees this object."""

    def __init__(self, options: TrainerOptions, rank: int) -> None:
        self.options = options
        self.rank = rank
        self.world_size = options.world_size
        self.plugins: dict[str, Any] = {}
        self.weights = 1
        self.steps = 0
        self.rendezvous_seen = ""
        self.copied: tuple[Path, list[int]] = (Path(), [])
        self.may_write = threading.Event()
        self.may_write.set()

    def watch(self) -> None:
        threading.Event().wait()

    def rendezvous(self) -> str:
        return f"toy of {os.getpid()}"

    def open(self, rendezvous: str) -> None:
        if self.options.model_path.name == "broken":
            raise ConfigError("no such model", key="model.path")
        if self.options.model_path.name == "deadly" and self.rank == self.world_size - 1:
            os._exit(1)
        self.rendezvous_seen = rendezvous

    def step(self, batch: Batch) -> StepStats:
        if batch.step != self.steps + 1:
            raise ValueError(f"a batch for step {batch.step}, but the next step is {self.steps + 1}")
        if batch.step in self.plugins.get("dies_in", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        self._update(json.dumps([[t.response_ids for t in group.trajectories] for group in batch.groups]))
        self.steps = batch.step
        return StepStats(self.steps, {"weights": float(self.weights), "tokens": 1.0})

    def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        self._update(f"{lr} {[example.completion_ids for example in examples]}")
        return StepStats(0, {})

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(self, *args, **kwargs)

    def begin_save(self, folder: Path) -> None:
        self.copied = (folder, [self.weights, self.steps])

    def finish_save(self) -> None:
        self.may_write.wait(60)
        folder, state = self.copied
        if self.rank == 0:
            folder.with_suffix(".tmp").mkdir(parents=True)
            (folder.with_suffix(".tmp") / "toy.json").write_text(json.dumps(state))
            folder.with_suffix(".tmp").rename(folder)

    def load(self, folder: Path) -> int:
        self.weights, self.steps = json.loads((folder / "toy.json").read_text())
        return self.steps

    def _update(self, text: str) -> None:
        self.weights = (self.weights * 31 + sum(text.encode())) * 1_000_003 % MODULUS


def start_toy(cls: type[Any], /, *args: Any, options: ActorOptions) -> RemoteActor:
    """A `start` for MegatronTrainer."""
    return start_actor(ToyRank, *args, options=options)


def pid_of(rank: Any) -> int:
    return os.getpid()


def thread_of(rank: Any) -> int:
    return threading.get_ident()


def state_of(rank: Any) -> tuple[int, int]:
    return rank.weights, rank.steps


def plugins_of(rank: Any) -> dict[str, Any]:
    plugins: dict[str, Any] = rank.plugins
    return plugins


def die_in_step(rank: Any, victim: int, step: int) -> None:
    """Have rank `victim` be killed at the start of `step`, in this life of it."""
    if rank.rank == victim:
        rank.plugins["dies_in"] = (step,)


def wait_for_ever(rank: Any, entered: Path) -> None:
    """As in a collective; each rank leaves a file in `entered` when its wait begins."""
    (entered / str(rank.rank)).touch()
    threading.Event().wait()


def wait_for_word(rank: Any, pipes: Path) -> None:
    """Until somebody has opened and closed the rank's named pipe in `pipes` for writing."""
    (pipes / str(rank.rank)).read_text()


def refuse_on(rank: Any, index: int, others_wait: bool) -> int:
    """Rank `index` raises an error of its own; the others answer, or wait for it for ever."""
    if rank.rank == index:
        raise ConfigError(f"not with rank {index}", key="k")
    if others_wait:
        threading.Event().wait()
    return int(rank.rank)


def fail_unless(rank: Any, spared: int) -> None:
    """As in a collective whose connection to `spared` broke: the others fail, it waits for ever."""
    if rank.rank == spared:
        threading.Event().wait()
    raise RuntimeError("Connection closed by peer")


def die_while_others_wait(rank: Any, victim: int) -> None:
    """A rank is killed in a collective."""
    if rank.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def hold_writing(rank: Any, hold: bool) -> None:
    """From now on checkpoints are copied, but not written before this is called with False."""
    if hold:
        rank.may_write.clear()
    else:
        rank.may_write.set()
