"""The scheduler thread: continuous batching. It alone touches the model, the KV cache and the weights.

    submit / abort / call  -> inbox (waits on a condition, never polls)
    between two steps      -> commands: abort, pause, weights, labels
    one iteration          -> admit queued requests, one prefill chunk, one decode step, one delivery

An exception here (of a custom weight loader too) ends the process with a traceback: weights half written must not
serve. Called by `server` and `weight_update` on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from miles.engines.embedded.batch import RunningBatch
from miles.engines.embedded.model import Decoder
from miles.engines.embedded.prefill import Candidate, Prefill, choose_group
from miles.engines.embedded.prefix_cache import PrefixCache
from miles.engines.embedded.request import Request, RequestRefused, Update
from miles.engines.embedded.sampler import Sampler

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]

_MAX_UNDELIVERED = 1
"""Deliveries the event loop may lag behind before the next step waits: it bounds the backlog of a busy loop."""
_WORTH_KEEPING = 16
"""Sampled tokens from which on a finished sequence's KV goes to the prefix cache (for a next turn)."""


class Scheduler:
    """Owns the queue, the running batch and the thread. Public methods may be called from the event loop only."""

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        prefix_cache: PrefixCache,
        *,
        slots: int,
        max_total_tokens: int,
        chunk: int,
        weight_version: str,
    ) -> None:
        self.model = model
        self.weight_version = weight_version
        self.tokens_generated = 0
        self.steps = 0
        self.paused = False
        self._prefixes = prefix_cache
        self._max_total_tokens = max_total_tokens
        self._chunk = chunk
        self._running = RunningBatch(model, sampler, slots)
        self._prefill: Prefill | None = None
        self._queue: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._order = 0
        self._reserved = 0
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._undelivered = 0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # Called on the event loop.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; updates go to `loop`."""
        self._loop = loop
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step in progress; False when it did not end in time. Blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self._running) + (len(self._prefill.requests) if self._prefill else 0)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def held_tokens(self) -> int:
        """Tokens reserved by the requests that hold KV."""
        return self._reserved

    def submit(self, request: Request) -> None:
        """Queue a request. Its id must not be live."""
        self._post(lambda: self._enqueue(request))

    def abort(self, rid: str) -> None:
        """Abort one request by its exact id; an unknown one is ignored."""
        self._post(lambda: self._abort(rid))

    def abort_all(self) -> None:
        """Abort every request that runs or is queued."""
        self._post(self._abort_all)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping; returns when no step is running."""
        await self.call(lambda: self._pause(mode))

    async def resume(self) -> None:
        """Step again; harmless when not paused."""
        await self.call(self._resume)

    async def flush_cache(self) -> None:
        """Forget all prefix KV. Raises RequestRefused while requests hold KV."""
        await self.call(self.flush_prefixes)

    async def set_weight_version(self, label: str) -> None:
        """Label the tokens sampled from now on."""

        def apply() -> None:
            self.weight_version = label

        await self.call(apply)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the scheduler thread between two steps. A RequestRefused it raises comes back here."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = function()
            except RequestRefused as refusal:
                loop.call_soon_threadsafe(_settle, future, None, refusal)
            else:
                loop.call_soon_threadsafe(_settle, future, result, None)

        self._post(command)
        return await future

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    def _acknowledge(self) -> None:
        with self._changed:
            self._undelivered -= 1
            self._changed.notify()

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            update.output.push(update)
        # The writers woken by these updates run before this callback: steps and writes take turns, which on one core
        # is cheaper than two threads competing for the interpreter lock.
        asyncio.get_running_loop().call_soon(self._acknowledge)

    # Called on the scheduler thread.

    def check_can_flush(self) -> None:
        """Raise RequestRefused while requests hold KV (running, or paused in place)."""
        if self.running:
            raise RequestRefused(f"cannot flush the cache: {self.running} requests hold KV")

    def flush_prefixes(self) -> None:
        """Forget all prefix KV. Raises RequestRefused while requests hold KV."""
        self.check_can_flush()
        self._prefixes.clear()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._iterate()
        except BaseException:  # noqa: BLE001 - the supervised boundary: nothing may be served after a failure here
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _await_work(self) -> bool:
        """Run commands; return True when a step is due, False when stopping."""
        while True:
            with self._changed:
                while not (self._inbox or self._stopping or self._step_due()):
                    self._changed.wait()
                commands = list(self._inbox)
                self._inbox.clear()
                if self._stopping and not commands:
                    return False
            for command in commands:
                command()
            if self._step_due():
                return True

    def _step_due(self) -> bool:
        busy = self._queue or self._prefill is not None or self._running.requests
        return bool(busy) and not self.paused and self._undelivered < _MAX_UNDELIVERED

    def _iterate(self) -> None:
        self._admit()
        if self._prefill is not None and self._prefill.advance():
            self._finish_prefill(self._prefill)
            # Requests that wait for a prompt just computed (a group's siblings) join the same step.
            self._admit()
        if self._running.requests:
            self._decode()

    def _decode(self) -> None:
        tokens, logprobs, kept = self._running.step()
        version = self.weight_version
        updates: list[Update] = []
        ended: list[int] = []
        for row, request in enumerate(self._running.requests):
            token = tokens[row]
            finish = request.accept(token, version)
            spans: tuple[Any, ...] = ()
            if finish is not None:
                ended.append(row)
                spans = tuple(request.spans)
            cached, support = request.cached_tokens or 0, None if kept is None else kept[row]
            updates.append(Update(request.output, token, logprobs[row], version, finish, spans, cached, support))
        self.steps += 1
        self.tokens_generated += len(tokens)
        # From the last row down, so that the row that moves into a hole is one that stays.
        for row in reversed(ended):
            self._forget(self._running.requests[row])
            self._leave(row)
        self._send(updates)

    def _admit(self) -> None:
        """Move queued requests to the running batch where their KV is known; start a prefill for others."""
        candidates: list[Candidate] = []
        taken = set()
        skipped: list[Request] = []
        claimed = 0  # tokens of the candidates: reserved only once a prefill of them starts
        free = self._running.free - (len(self._prefill.requests) if self._prefill else 0)
        while self._queue and free > len(candidates) + len(skipped):
            request = self._queue[0]
            if self._reserved + claimed + request.reserved_tokens > self._max_total_tokens:
                break
            self._queue.popleft()
            known = request.tokens[:-1]
            held, segments = self._prefixes.match(request.salt, known)
            if held == len(known):
                self._reserved += request.reserved_tokens
                self._join(request, held, segments)
                free -= 1
                continue
            key = (request.salt, tuple(known))
            if self._prefill is not None or (self._prefixes.enabled and key in taken):
                skipped.append(request)
                continue
            taken.add(key)
            claimed += request.reserved_tokens
            candidates.append(Candidate(request, held, segments))
        if candidates:
            group = choose_group(candidates, self._chunk)
            chosen = {id(candidate) for candidate in group}
            skipped += [candidate.request for candidate in candidates if id(candidate) not in chosen]
            self._start_prefill(group)
        if skipped:
            self._requeue(skipped)

    def _start_prefill(self, group: list[Candidate]) -> None:
        for candidate in group:
            self._reserved += candidate.request.reserved_tokens
            if candidate.request.cached_tokens is None:
                candidate.request.cached_tokens = candidate.held
        self._prefill = Prefill(self.model, group, self._chunk)

    def _finish_prefill(self, prefill: Prefill) -> None:
        self._prefill = None
        for row, request in enumerate(prefill.requests):
            if request.finished:  # aborted meanwhile
                continue
            kv = prefill.result(row)
            self._prefixes.insert(request.salt, request.tokens[:-1], kv)
            self._running.join(request, [kv])

    def _join(self, request: Request, held: int, segments: list[torch.Tensor]) -> None:
        if request.cached_tokens is None:
            request.cached_tokens = held
        self._running.join(request, segments)

    def _leave(self, row: int) -> None:
        request = self._running.requests[row]
        if len(request.tokens) - request.prompt_length >= _WORTH_KEEPING:
            self._prefixes.insert(request.salt, request.tokens[:-1], self._running.kv(row))
        self._running.leave(row)
        self._reserved -= request.reserved_tokens

    def _requeue(self, requests: list[Request]) -> None:
        """Put requests back in the order of their arrival."""
        self._queue = deque(sorted([*requests, *self._queue], key=lambda request: request.order))

    def _enqueue(self, request: Request) -> None:
        self._order += 1
        request.order = self._order
        self._requests[request.rid] = request
        self._queue.append(request)

    def _forget(self, request: Request) -> None:
        request.finished = True
        del self._requests[request.rid]

    def _abort(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is None:
            return
        self._forget(request)
        if request in self._queue:
            self._queue.remove(request)
        elif request in self._running.requests:
            self._leave(self._running.requests.index(request))
        else:  # in prefill: its row is computed and thrown away
            self._reserved -= request.reserved_tokens
        finish = {"type": "abort", "message": "aborted"}
        last = Update(
            request.output, None, 0.0, self.weight_version, finish, tuple(request.spans), request.cached_tokens or 0
        )
        self._send([last])

    def _abort_all(self) -> None:
        for rid in list(self._requests):
            self._abort(rid)

    def _pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self._abort_all()
            self._prefill = None
        elif mode == "retract":
            self._retract()

    def _retract(self) -> None:
        """Send every request that holds KV back to the queue, with the tokens it has; drop all KV."""
        retracted = list(self._running.requests)
        for row in reversed(range(len(retracted))):
            self._running.leave(row)
        if self._prefill is not None:
            retracted += [request for request in self._prefill.requests if not request.finished]
            self._prefill = None
        self._reserved = 0
        self._requeue(retracted)
        # The weights may change before they run again: KV of the old ones must not come back through the cache.
        self._prefixes.clear()

    def _resume(self) -> None:
        self.paused = False

    def _send(self, updates: list[Update]) -> None:
        assert self._loop is not None
        with self._changed:
            self._undelivered += 1
        self._loop.call_soon_threadsafe(self._deliver, updates)


def _settle(future: asyncio.Future[T], result: Any, error: Exception | None) -> None:
    if future.done():  # the caller was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
