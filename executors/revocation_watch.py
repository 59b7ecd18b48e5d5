"""Tells running requests that their lease was revoked, with one waiting task per incarnation instead of per request.

A watcher lives while somebody is subscribed to its revocation. Owned by the executor, used by executors.generation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from executors.ports import Revocation


class _Watcher:
    __slots__ = ("callbacks", "revoked", "scope")

    def __init__(self, revoked: Revocation) -> None:
        self.revoked = revoked
        self.callbacks: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.scope = anyio.CancelScope()


class RevocationWatch:
    """Callbacks on revocations. Leases of one incarnation may share a Revocation object, or have one each."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._watchers: dict[int, _Watcher] = {}
        self._next_ticket = 0

    def subscribe(self, revoked: Revocation, callback: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Run `callback` in a task of its own when `revoked` is set. Returns the ticket to unsubscribe with."""
        self._next_ticket += 1
        ticket = self._next_ticket
        watcher = self._watchers.get(id(revoked))
        if watcher is None:
            watcher = self._watchers[id(revoked)] = _Watcher(revoked)
            self._tasks.start_soon(self._watch, watcher, name="revocation watch")
        watcher.callbacks[ticket] = callback
        return ticket

    def unsubscribe(self, revoked: Revocation, ticket: int) -> None:
        """Forget a callback; harmless after it was called."""
        watcher = self._watchers.get(id(revoked))
        if watcher is None:
            return
        watcher.callbacks.pop(ticket, None)
        if not watcher.callbacks:
            del self._watchers[id(revoked)]
            watcher.scope.cancel()

    async def _watch(self, watcher: _Watcher) -> None:
        with watcher.scope:
            await watcher.revoked.wait()
            self._watchers.pop(id(watcher.revoked), None)
            for callback in list(watcher.callbacks.values()):
                self._tasks.start_soon(callback, name="on revocation")
