"""The run's durable record, `journal.sqlite`: groups and their outcomes, the data cursor, weight versions.

Invariants: a group has at most one outcome row; a version number is reserved on the disk before it is handed out, so
it is never handed out twice. Write-ahead log with `synchronous=NORMAL`: a committed row survives the death of the
process; reserved numbers are forced to the disk and survive that of the machine. Called by the executor and, as the
ledger's LedgerStore, by the controller.
"""

from __future__ import annotations

import sqlite3
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio.to_thread
import msgspec

from controllers.weight_versions import WeightVersion
from executors.errors import JournalFailed
from executors.group_account import Outcome
from executors.journal_writer import JournalWriter
from executors.trajectory import Group

_RESERVE_BLOCK = 32
"""Version numbers reserved at a time, so that `reserve` need not wait for the disk."""

_WRITE_DEADLINE_S = 30.0

_TABLES = """
CREATE TABLE IF NOT EXISTS groups(
    group_id TEXT PRIMARY KEY, number INTEGER NOT NULL, prompt_index INTEGER NOT NULL, cursor INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS finished(group_id TEXT PRIMARY KEY, sampled_step INTEGER NOT NULL, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes(group_id TEXT PRIMARY KEY, outcome TEXT NOT NULL, reason TEXT, step INTEGER);
CREATE TABLE IF NOT EXISTS versions(
    number INTEGER PRIMARY KEY, step INTEGER NOT NULL, lineage INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS reserved(id INTEGER PRIMARY KEY CHECK (id = 0), through INTEGER NOT NULL);
INSERT OR IGNORE INTO reserved VALUES (0, 0);
"""


class Journal:
    """One open journal. `with` or `async with` closes it; closing writes everything that was recorded.

    Recording never waits for the disk; `commit` and, rarely, `reserve` do. Every call raises JournalFailed once a
    write has failed.
    """

    def __init__(self, path: Path, *, max_backlog: int = 20_000) -> None:
        self._path = path
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(_TABLES)
                self._read_state(connection)
                self._reserved_through = self._next_version + _RESERVE_BLOCK - 1
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("UPDATE reserved SET through = ?", (self._reserved_through,))
                connection.execute("PRAGMA synchronous=NORMAL")
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise JournalFailed(f"{path}: {error}", path=str(path)) from error
        self._extension: Future[None] | None = None
        self._writer = JournalWriter(connection, path, max_backlog=max_backlog)

    def _read_state(self, connection: sqlite3.Connection) -> None:
        number, cursor = connection.execute("SELECT MAX(number), MAX(cursor) FROM groups").fetchone()
        self._next_group = 0 if number is None else number + 1
        self._data_cursor = cursor or 0
        (through,) = connection.execute("SELECT through FROM reserved").fetchone()
        self._next_version: int = through + 1
        row = connection.execute("SELECT number, step, lineage, digest FROM versions ORDER BY number DESC LIMIT 1")
        newest = row.fetchone()
        self._latest = None if newest is None else WeightVersion(*newest)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):  # what was recorded must reach the disk, also on Ctrl-C; it has a deadline
            await anyio.to_thread.run_sync(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write everything and close. Blocks until it is done. Idempotent."""
        last_used = self._next_version - 1
        if not self._writer.ended:
            self._writer.submit(lambda db: _execute(db, "UPDATE reserved SET through = ?", last_used), fsync=True)
        self._writer.close(_WRITE_DEADLINE_S)

    def flush(self) -> None:
        """Block until everything recorded so far is committed."""
        self._wait(self._writer.submit(lambda db: None))

    # Groups

    @property
    def next_group_number(self) -> int:
        """The number after the highest of all groups ever dispatched in this run."""
        return self._next_group

    @property
    def data_cursor(self) -> int:
        """The position of the prompt source after the last dispatched group."""
        return self._data_cursor

    def dispatched(self, group_id: str, number: int, prompt_index: int, cursor: int) -> None:
        """Record that a group went out, with the data cursor after its prompt."""
        self._next_group = number + 1
        self._data_cursor = cursor
        self._record("INSERT INTO groups VALUES (?, ?, ?, ?)", group_id, number, prompt_index, cursor)

    def finished(self, group: Group) -> None:
        """Record the samples of a group that now waits for the trainer."""

        def write(db: sqlite3.Connection) -> None:  # encodes in the writer's thread
            payload = msgspec.msgpack.encode(group, enc_hook=str)
            _execute(db, "INSERT INTO finished VALUES (?, ?, ?)", group.group_id, group.sampled_step, payload)

        self._writer.post(write)

    def ended(self, group_id: str, outcome: Outcome, reason: str | None, step: int | None) -> None:
        """Record a group's outcome. A second one for the same group fails the journal."""
        self._record("INSERT INTO outcomes VALUES (?, ?, ?, ?)", group_id, outcome, reason, step)

    def _record(self, sql: str, *values: object) -> None:
        self._writer.post(lambda db: _execute(db, sql, *values))

    # LedgerStore

    def reserve(self) -> int:
        """Reserve the next version number durably and return it. Never returns a number twice, across reopening.

        Numbers are reserved in blocks ahead of need; after a crash the unused rest of a block is skipped.
        """
        number = self._next_version
        if self._extension is not None and (number > self._reserved_through or self._extension.done()):
            self._wait(self._extension)
            self._extension = None
            self._reserved_through += _RESERVE_BLOCK
        if self._extension is None and self._reserved_through - number < _RESERVE_BLOCK // 2:
            through = self._reserved_through + _RESERVE_BLOCK
            sql = "UPDATE reserved SET through = ?"
            self._extension = self._writer.submit(lambda db: _execute(db, sql, through), fsync=True)
        self._next_version += 1
        return number

    def commit(self, version: WeightVersion) -> None:
        """Record a published version; returns when it is committed."""
        values = (version.number, version.step, version.lineage, version.digest)
        self._wait(self._writer.submit(lambda db: _execute(db, "INSERT INTO versions VALUES (?, ?, ?, ?)", *values)))
        self._latest = version

    def latest(self) -> WeightVersion | None:
        """The newest committed version, or None before the first."""
        return self._latest

    def _wait(self, done: Future[None]) -> None:
        try:
            done.result(_WRITE_DEADLINE_S)
        except FutureTimeout:
            raise JournalFailed(f"{self._path}: no write within {_WRITE_DEADLINE_S} s", path=str(self._path)) from None


def read_buffered(path: Path) -> list[Group]:
    """The groups that were finished and had no outcome, oldest first, as the journal at `path` knows them."""
    sql = """SELECT payload FROM finished LEFT JOIN outcomes USING (group_id)
             WHERE outcome IS NULL ORDER BY sampled_step, group_id"""
    connection = sqlite3.connect(path, timeout=5.0)
    try:
        return [msgspec.msgpack.decode(payload, type=Group) for (payload,) in connection.execute(sql)]
    finally:
        connection.close()


def _execute(db: sqlite3.Connection, sql: str, *values: object) -> None:
    db.execute(sql, values)
