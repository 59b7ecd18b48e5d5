"""The journal: numbers never handed out twice, rows that survive a crash, a writer that says when it fails."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from controllers.weight_versions import VersionLedger, WeightVersion
from executors.errors import JournalFailed
from executors.journal import Journal, read_buffered
from executors.trajectory import Group, Prompt, StopReason, Trajectory, VersionSpan
from tests.support.virtual_time import virtual_time


def make_group(number: int, sampled_step: int = 0) -> Group:
    trajectory = Trajectory(
        (1, 2), (3, 4, 5), (-0.1, -1e-7, -3.0), (VersionSpan(1, 0, 3, "i0"),), StopReason.STOP, reward=0.5
    )
    prompt = Prompt(number, (1, 2), "label", "text", {"key": [1, None]})
    return Group(f"g{number:010d}", prompt, (trajectory, trajectory), sampled_step)


def version(number: int) -> WeightVersion:
    return WeightVersion(number, number - 1, 0, "0123456789abcdef")


def test_reserved_numbers_are_never_repeated_across_reopening(tmp_path: Path) -> None:
    """Fails when `reserve` does not write before it hands out, or the first block is not written on opening."""
    path = tmp_path / "journal.sqlite"
    numbers: list[int] = []
    unclosed = []
    for opening in range(6):
        journal = Journal(path)
        numbers.extend(journal.reserve() for _ in range(5 if opening % 3 == 1 else 50))
        if opening % 2:
            unclosed.append(journal)  # as after a crash: nothing is given back
        else:
            journal.close()
    assert numbers == sorted(set(numbers))
    assert numbers[:55] == list(range(1, 56))  # a clean close gives the unused rest of a block back
    for journal in unclosed:
        journal._writer.close(5.0)


def test_a_committed_version_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        assert journal.latest() is None
        ledger = VersionLedger(journal)
        number = ledger.reserve()
        ledger.commit(version(number))
    with Journal(path) as journal:
        assert journal.latest() == version(number)
        assert VersionLedger(journal).reserve() == number + 1


_CRASH = """
import os, signal, sys
from pathlib import Path
from executors.journal import Journal
from tests.executors.test_journal import make_group, version
journal = Journal(Path(sys.argv[1]))
for number in range(3):
    journal.dispatched(f"g{number:010d}", number, number, number + 1)
journal.finished(make_group(0, 5))
journal.finished(make_group(1, 4))
journal.finished(make_group(2, 6))
journal.ended("g0000000002", "trained", None, 1)
for _ in range(40):
    number = journal.reserve()
journal.commit(version(number))
journal.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_committed_survives_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    done = subprocess.run([sys.executable, "-c", _CRASH, str(path)], timeout=30, check=False)
    assert done.returncode == -9
    with Journal(path) as journal:
        assert (journal.next_group_number, journal.data_cursor) == (3, 3)
        assert journal.latest() == version(40)
        assert journal.reserve() > 40
    assert read_buffered(path) == [make_group(1, 4), make_group(0, 5)]


def test_closing_writes_everything(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        for number in range(2500):
            journal.dispatched(f"g{number:010d}", number, number, number + 1)
    with Journal(path) as journal:
        assert journal.next_group_number == 2500


def test_a_second_outcome_fails_the_journal(tmp_path: Path) -> None:
    """Fails without the primary key of `outcomes`."""
    journal = Journal(tmp_path / "journal.sqlite")
    journal.ended("g0000000000", "trained", None, 1)
    journal.ended("g0000000000", "dropped", "stale", None)
    with pytest.raises(JournalFailed):
        journal.flush()
    with pytest.raises(JournalFailed, match="UNIQUE"):
        journal.dispatched("g0000000001", 1, 1, 1)
    with pytest.raises(JournalFailed, match="UNIQUE"):
        journal.close()


def test_a_backlog_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path, max_backlog=100) as journal:
        blocker = sqlite3.connect(path)
        blocker.execute("BEGIN IMMEDIATE")  # the writer waits for this lock
        with pytest.raises(JournalFailed, match="100 writes wait"):
            for number in range(5000):
                journal.dispatched(f"g{number:010d}", number, number, number)
        blocker.rollback()
        blocker.close()
        journal.flush()


def test_a_file_that_is_no_journal_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, and longer than a header would be" * 10)
    with pytest.raises(JournalFailed, match=r"journal\.sqlite"):
        Journal(path)


@virtual_time
async def test_async_block_closes(tmp_path: Path) -> None:
    async with Journal(tmp_path / "journal.sqlite") as journal:
        journal.dispatched("g0000000000", 0, 0, 1)
    with pytest.raises(JournalFailed, match="closed"):
        journal.dispatched("g0000000001", 1, 1, 2)
