"""Real processes joined by gloo, kept over many checks: `with ranks(2) as group: group.run(function, *args)`.

    group.run(function, *args)          function(*args) on every rank; results in rank order
    group.run_as(sizes, function, ...)  the same with Megatron's groups cut by `sizes`

Functions are importable ones. Ranks are forked from a server that has imported Megatron, so the second group of a
session starts in a moment. An error of any rank is raised here; ranks that then do not answer are ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from miles.trainer.parallel import ParallelSizes

R = TypeVar("R")

START_TIMEOUT_S = 100.0
CALL_TIMEOUT_S = 40.0
GRACE_S = 5.0
"""How long the other ranks may go on once one has failed."""
STACK_WAIT_S = 0.5


class RankFailed(Exception):
    """A function raised on a rank; the message holds that rank's traceback."""


class Ranks:
    """Handles to the processes, in rank order."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes
        self._broken = False

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., R], *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[R]:
        """`function(*args)` on every rank at once. Raises RankFailed, or TimeoutError after `timeout_s`."""
        return self._call(None, function, args, timeout_s)

    def run_as(
        self, sizes: ParallelSizes, function: Callable[..., R], *args: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[R]:
        """`function(*args)` on every rank, with Megatron's parallel state made for `sizes`."""
        return self._call(sizes, function, args, timeout_s)

    def _call(self, sizes: ParallelSizes | None, function: Callable[..., R], args: Any, timeout_s: float) -> list[R]:
        if self._broken:
            raise RuntimeError("these ranks failed in an earlier call")
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a process that is gone shows as one that does not answer
                pipe.send((sizes, function, args))
        return self.answers(timeout_s)

    def answers(self, timeout_s: float) -> list[Any]:
        """One answer of every rank."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waiting:
            for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                good, value = _received(pipe)
                if good:
                    results[rank] = value
                elif not failures:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if waiting and time.monotonic() >= deadline:
                self._broken = True
                self._show_stacks(list(waiting.values()))
                break
        if failures:
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        if waiting:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout_s} s")
        return [results[rank] for rank in sorted(results)]

    def _show_stacks(self, hanging: list[int]) -> None:
        """Let ranks that do not answer write to stderr where they are."""
        for rank in hanging:
            os.kill(self.pids[rank], signal.SIGUSR1)
        wait([self._pipes[rank] for rank in hanging], STACK_WAIT_S)

    def end(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, "the process is gone"
    return answer


@contextlib.contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """Start `count` processes that have joined one gloo group, and end them on the way out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    processes: list[Any] = []
    pipes: list[Connection] = []
    group = Ranks(processes, pipes)
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, theirs), daemon=True, name=f"rank-{rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        first = Ranks(processes[:1], pipes[:1])
        (rendezvous,) = first.answers(START_TIMEOUT_S)
        for pipe in pipes:
            pipe.send(rendezvous)
        group.answers(START_TIMEOUT_S)
        yield group
    finally:
        group.end()


def _serve(rank: int, count: int, pipe: Connection) -> None:
    """The main function of a rank: calls until the other end of the pipe is closed."""
    from tests.support import rank_imports

    rank_imports.quiet()
    faulthandler.register(signal.SIGUSR1)
    rendezvous = ""
    store = None
    try:
        if rank == 0:
            store, rendezvous = rank_imports.host()
            pipe.send((True, rendezvous))
        rendezvous = pipe.recv()
        rank_imports.meet(rank, count, store, rendezvous)
        pipe.send((True, None))
        while True:
            sizes, function, args = pipe.recv()
            try:
                if sizes is not None:
                    rank_imports.divide_anew(sizes)
                answer = (True, function(*args))
            except Exception:  # noqa: BLE001 - it is raised again in the test's process
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    except EOFError:
        return
