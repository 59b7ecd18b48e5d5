"""A trainer rank (or a lone reader) as a real process that runs importable functions sent to it over a pipe.

`RankProcess` is a RankRunner of one rank. Its weights are constant tensors, all holding the same number, so that a
torn read shows as two numbers. SIGKILL and SIGSTOP it as you like; leaving the context ends it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio.to_thread
import torch

from controllers.errors import ActorDied
from miles.weight_sync.plan import whole
from miles.weight_sync.publisher import publisher_of
from tests.miles.weight_sync.tensors import LocalShard

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class ProcessContext:
    """The context in the rank's process."""

    weights: dict[str, torch.Tensor]
    rank: int = 0
    world_size: int = 1
    plugins: dict[str, Any] = field(default_factory=dict)

    def shards(self) -> Iterator[LocalShard]:
        for name, tensor in self.weights.items():
            yield LocalShard(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor)


def _serve(pipe: Connection, shapes: dict[str, tuple[int, ...]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    context = ProcessContext({name: torch.zeros(shape) for name, shape in shapes.items()})
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(context, *args, **kwargs)))
        except Exception as error:  # noqa: BLE001 - sent back to the test, which raises it
            pipe.send((False, error))


def fill(context: ProcessContext, value: float) -> None:
    """Make every weight `value`."""
    for tensor in context.weights.values():
        tensor.fill_(value)


def publish_for_ever(context: ProcessContext, burst: int, rest_s: float) -> None:
    """Stage version after version, each full of its number, into slots in turn: no lease, no committed slot.

    `burst` versions at full speed, when no reader can be fast enough, then a rest in which one can.
    """
    arena = publisher_of(context).arena

    def loop() -> None:
        version = 0
        while True:
            version += 1
            fill(context, float(version % 1024))
            arena.stage(version % arena.layout.n_slots, version, context.shards())
            if version % burst == 0:
                time.sleep(rest_s)

    threading.Thread(target=loop, daemon=True).start()


class RankProcess:
    """One process. `env` is set while it starts, so that it reaches UCX."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], env: Mapping[str, str] | None = None) -> None:
        self._shapes = dict(shapes)
        self._env = dict(env or {})
        self._pipe: Connection | None = None
        self._process: Any = None
        self.incarnation = 1
        self.steps_done = 0

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def __enter__(self) -> RankProcess:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        try:
            self._process = spawn.Process(target=_serve, args=(theirs, self._shapes), daemon=True)
            self._process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pipe is not None
        self._pipe.close()
        os.kill(self.pid, signal.SIGCONT) if self._process.is_alive() else None
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def call(self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function` there; raises what it raised, ActorDied when the process is gone."""
        assert self._pipe is not None
        try:
            self._pipe.send((function, args, kwargs))
            ok, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ActorDied("the rank's process is gone", actor="trainer-0") from error
        if not ok:
            raise answer
        return answer  # type: ignore[no-any-return]

    async def on_each_rank(
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return [await anyio.to_thread.run_sync(functools.partial(self.call, function, *args, **kwargs))]
