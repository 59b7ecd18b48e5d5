from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from miles.cluster import reaper
from tests.support.processes import wait_gone

pytestmark = pytest.mark.real

_WAIT = "import threading; threading.Event().wait()"


class Bystanders:
    """Starts processes and ends at the end those that still run."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, code: str = _WAIT, *, env: dict[str, str] | None = None) -> int:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], env={**os.environ, **(env or {})})
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process.pid


    def start_and_hear(self, code: str, *, title: str = sys.executable) -> int:
        """Start one that prints a line; return when it has."""
        process = subprocess.Popen(
            [title, "-I", "-S", "-c", code], executable=sys.executable, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        assert process.stdout.readline()
        return process.pid


@pytest.fixture
def processes() -> Iterator[Bystanders]:
    with ExitStack() as stack:
        yield Bystanders(stack)


def test_a_marked_process_is_ended_and_its_neighbour_is_not(processes: Bystanders) -> None:
    marker = f"MILES_RUN_{secrets.token_hex(6)}"
    marked, neighbour = processes.start(env={marker: "1"}), processes.start()
    belongings = reaper.Belongings()
    belongings.markers.add(marker)
    assert reaper.end_processes(belongings, 5) == set()
    assert wait_gone([marked], 5) == []
    assert reaper.start_ticks(neighbour) is not None


def test_a_pid_with_another_start_time_is_somebody_else(processes: Bystanders) -> None:
    """Fails when roots are compared by pid alone (`_owns`)."""
    pid = processes.start()
    ticks = reaper.start_ticks(pid)
    assert ticks is not None
    belongings = reaper.Belongings()
    belongings.roots.add(reaper.ProcessId(pid, ticks - 1))
    assert belongings.processes() == set()
    belongings.roots.add(reaper.ProcessId(pid, ticks))
    assert belongings.processes() == {reaper.ProcessId(pid, ticks)}


def test_descendants_of_a_recorded_process_belong_to_it(processes: Bystanders) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-I', '-S', '-c', {_WAIT!r}])"
    parent = processes.start(code + "; sys.exit()")
    ticks = reaper.start_ticks(parent)
    assert ticks is not None
    belongings = reaper.Belongings()
    belongings.roots.add(reaper.ProcessId(parent, ticks))
    child = _first_child(parent)
    assert {process.pid for process in belongings.processes()} == {parent, child}
    assert reaper.end_processes(belongings, 5) == set()
    assert wait_gone([parent, child], 5) == []


def _first_child(pid: int) -> int:
    while True:
        for entry in reaper.process_table().values():
            if entry.parent == pid:
                return entry.id.pid


def test_own_process_and_its_ancestors_are_spared() -> None:
    """Fails without `_with_ancestors`: this very process would be among those to end."""
    ticks = reaper.start_ticks(os.getpid())
    assert ticks is not None
    belongings = reaper.Belongings()
    belongings.roots.add(reaper.ProcessId(os.getpid(), ticks))
    assert os.getpid() not in {process.pid for process in belongings.processes()}


def test_only_ray_daemons_belong_by_their_open_files(processes: Bystanders, tmp_path: Path) -> None:
    """A person's `tail -f` of a log in the run's folder is not the run's."""
    code = f"file = open({str(tmp_path / 'raylet.log')!r}, 'w'); print(1, flush=True); {_WAIT}"
    reader, daemon = processes.start_and_hear(code), processes.start_and_hear(code, title="ray::Agent")
    belongings = reaper.Belongings()
    belongings.folders.add(str(tmp_path))
    found = {process.pid for process in belongings.processes()}
    assert daemon in found and reader not in found


def test_segments_go_by_prefix_or_when_nobody_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "SHM_FOLDER", str(tmp_path))
    for name in ("run-a", "run-b", "torch_held", "torch_free", "other"):
        (tmp_path / name).touch()
    with open(tmp_path / "torch_held"):
        reaper.remove_segments({str(tmp_path / "torch_held"), str(tmp_path / "torch_free")}, {"run-"})
    assert {path.name for path in tmp_path.iterdir()} == {"torch_held", "other"}
