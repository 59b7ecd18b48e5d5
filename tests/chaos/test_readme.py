"""The README's Python loop is run as it stands there."""

from __future__ import annotations

import ast
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.small_run import (
    REPOSITORY,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    least_available,
    read_events,
    read_summary,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


async def test_readme_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 steps with a rolling restart at step 20, and an evaluation at the end."""
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1 and "rolling_restart" in blocks[0]
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    code = compile(blocks[0], "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    loop: Coroutine[Any, Any, None] = eval(code, {})
    await loop
    folder = tmp_path / "runs" / "quickstart"
    summary, events = read_summary(folder), read_events(folder)
    assert summary["status"] == "finished" and summary["steps"] == 50
    assert summary["engine_restarts"] == 2
    assert summary["eval"]["last"] is not None and "Evaluation(step=50" in capsys.readouterr().out
    assert least_available(events) >= 1
    assert_served_only_what_was_proven(events)
    assert_account_adds_up(summary)
