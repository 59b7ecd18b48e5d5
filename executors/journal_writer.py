"""The thread that writes the journal, so that the event loop never waits for a disk.

Invariant: writes are applied in the order they were submitted, several to a transaction; a row that a done future
speaks for is committed. A failed write ends the writer, and every later submit says why. Called by executors.journal.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue

from executors.errors import JournalFailed

Write = Callable[[sqlite3.Connection], None]

_MAX_BATCH = 1000

_GATHER_S = 0.05
"""How long writes that nobody waits for are gathered into one transaction."""


class JournalWriter:
    """Owns the connection from its start on; closes it."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, max_backlog: int) -> None:
        self._connection = connection
        self._path = path
        self._max_backlog = max_backlog
        self._queue: SimpleQueue[tuple[Write, bool, Future[None]] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._hurry = threading.Event()
        # A daemon: a driver that dies without closing the journal must not hang in the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing more can be submitted."""
        return self._closed or self._failure is not None

    def post(self, write: Write) -> None:
        """Queue a write that nobody waits for. Raises JournalFailed when `max_backlog` writes are queued already."""
        if self._queue.qsize() >= self._max_backlog:
            raise JournalFailed(f"{self._path}: {self._max_backlog} writes wait for the disk", path=str(self._path))
        self._put(write, fsync=False)

    def submit(self, write: Write, *, fsync: bool = False) -> Future[None]:
        """Queue a write, and apply it soon. Its future is done when it is committed, with `fsync` also on the disk.

        Raises JournalFailed when the writer has ended.
        """
        done = self._put(write, fsync)
        self._hurry.set()
        return done

    def _put(self, write: Write, fsync: bool) -> Future[None]:
        if self._failure is not None:
            raise JournalFailed(f"{self._path}: {self._failure}", path=str(self._path)) from self._failure
        if self._closed:
            raise JournalFailed(f"{self._path} is closed", path=str(self._path))
        done: Future[None] = Future()
        self._queue.put((write, fsync, done))
        return done

    def close(self, timeout_s: float) -> None:
        """Apply what was submitted and close the connection. Idempotent. Raises JournalFailed if that fails."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._hurry.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise JournalFailed(f"{self._path}: still writing after {timeout_s} s", path=str(self._path))
        if self._failure is not None:
            raise JournalFailed(f"{self._path}: {self._failure}", path=str(self._path)) from self._failure

    def _run(self) -> None:
        batch: list[tuple[Write, bool, Future[None]]] = []
        try:
            while self._fill(batch):
                self._apply(batch)
                batch.clear()
        except Exception as error:  # noqa: BLE001 - the thread's boundary: recorded, and raised by every later call
            self._failure = error
            self._fail_waiters(batch, error)
        finally:
            self._connection.close()

    def _fill(self, batch: list[tuple[Write, bool, Future[None]]]) -> bool:
        """Wait for writes and take all there are. False when the writer is to end and nothing is left."""
        item = self._queue.get()
        self._hurry.wait(_GATHER_S)
        self._hurry.clear()
        while item is not None:
            batch.append(item)
            if len(batch) >= _MAX_BATCH:
                break
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
        if item is None and batch:
            self._queue.put(None)  # closing: once more round, to see the end with an empty batch
        return bool(batch)

    def _apply(self, batch: list[tuple[Write, bool, Future[None]]]) -> None:
        fsync = any(item[1] for item in batch)
        if fsync:
            self._connection.execute("PRAGMA synchronous=FULL")
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for write, _, _ in batch:
                write(self._connection)
        if fsync:
            self._connection.execute("PRAGMA synchronous=NORMAL")
        for _, _, done in batch:
            done.set_result(None)

    def _fail_waiters(self, batch: list[tuple[Write, bool, Future[None]]], error: Exception) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                batch.append(item)
        for _, _, done in batch:
            if not done.done():
                failed = JournalFailed(f"{self._path}: {error}", path=str(self._path))
                failed.__cause__ = error
                done.set_exception(failed)
