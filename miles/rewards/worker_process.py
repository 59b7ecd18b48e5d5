"""The driver's side of reward workers: one process, and a pool of them with a deadline per call.

Invariant: a worker that missed a deadline, broke or was cancelled in the middle of a call is ended and never reused,
so that an answer can only belong to the call that waits for it. Owned by `miles.rewards.scorer`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import Process

from controllers.errors import ActorDied, WaitTimeout
from miles.rewards.verdict import Answer, Verdict
from miles.rewards.worker import LENGTH_BYTES, frame

Call = tuple[str, str, str, Mapping[str, Any]]
"""Prompt, response, label, extra."""


class WorkerProcess:
    """One worker with the reward loaded."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self._received = b""

    @classmethod
    async def start(cls, reward: str) -> WorkerProcess:
        """Start one. Raises ActorDied where it does not come up, or cannot load the reward."""
        command = [sys.executable, "-m", "miles.rewards.worker", str(os.getpid())]
        process = await anyio.open_process(command, stderr=None)
        worker = cls(process)
        try:
            verdict, detail = await worker._exchange((sys.path, reward))
            if verdict is Verdict.ERROR:
                raise ActorDied(f"a reward worker cannot load {reward!r}: {detail}", actor="reward worker")
        except BaseException:
            await worker.end()
            raise
        return worker

    async def call(self, call: Call) -> Answer:
        """Call the function. Raises ActorDied when the worker ends before it answers."""
        return await self._exchange(call)

    async def end(self) -> None:
        """Kill it and reap it, also while being cancelled."""
        with anyio.CancelScope(shield=True):
            if self._process.returncode is None:
                self._process.kill()
            await self._process.aclose()

    async def _exchange(self, message: object) -> Answer:
        try:
            await self._requests.send(frame(message))
            body = await self._take(int.from_bytes(await self._take(LENGTH_BYTES), "little"))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, ConnectionError) as error:
            raise ActorDied("a reward worker ended in the middle of a call", actor="reward worker") from error
        answer: Answer = pickle.loads(body)
        return answer

    async def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._received += await self._replies.receive()
        taken, self._received = self._received[:count], self._received[count:]
        return taken


class WorkerPool:
    """Up to `size` workers for one reward, started when they are needed and kept. An async context manager."""

    def __init__(self, reward: str, *, size: int, call_timeout_s: float, start_timeout_s: float) -> None:
        self._reward = reward
        self._slots = anyio.Semaphore(size)
        self._call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s
        self._idle: list[WorkerProcess] = []

    async def __aenter__(self) -> WorkerPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().end()

    async def call(self, call: Call) -> Answer:
        """Call the reward in a free worker, waiting for one first.

        Raises WaitTimeout where the call takes over `call_timeout_s` (the wait for a worker does not count), and
        ActorDied where the worker ends in mid-call or does not start within `start_timeout_s`.
        """
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start()
            answered = False
            try:
                with anyio.fail_after(self._call_timeout_s):
                    answer = await worker.call(call)
                answered = True
            except TimeoutError as error:
                message = f"the reward took over {self._call_timeout_s} s"
                raise WaitTimeout(message, waited_for="the reward function") from error
            finally:
                if answered:
                    self._idle.append(worker)
                else:
                    await worker.end()
            return answer

    async def _start(self) -> WorkerProcess:
        try:
            with anyio.fail_after(self._start_timeout_s):
                return await WorkerProcess.start(self._reward)
        except TimeoutError as error:
            message = f"a reward worker did not load {self._reward!r} within {self._start_timeout_s} s"
            raise ActorDied(message, actor="reward worker") from error
