"""The same command on a person's own prompts: a JSONL file of 200 lines, names of keys and reward of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.config import load_config
from miles.train_loop import EXIT_DONE, run_training
from tests.chaos.small_run import REPOSITORY, assert_account_adds_up, read_summary, small

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def half_right(prompt: str, response: str, label: str) -> float:
    """A reward of the test's own: the share of the label's characters that stand where they should."""
    return sum(a == b for a, b in zip(response, label, strict=False)) / max(1, len(label))


@pytest.mark.parametrize("reward", ["exact_match", "tests.chaos.test_own_prompts:half_right"])
def test_trains_on_a_file_of_200_lines(tmp_path: Path, reward: str) -> None:
    """A prompt longer than the context is dropped and counted; the run goes on without it.

    It ends when the file is used up: 199 groups make 49 steps of 4, and 3 are left over.
    """
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(20)]
    rows[0]["question"] = "9" * 600
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = small(
        tmp_path / "run",
        data__path=str(file),
        data__prompt_key="question",
        data__label_key="answer",
        data__eval_fraction=0.0,
        eval__every=0,
        reward=reward,
        data__options={"epochs": 1},
        rollout__max_staleness=100,
        train__steps=60,
    )
    config = load_config(REPOSITORY / "configs" / "own-prompts.yaml", overrides)
    assert run_training(config) == EXIT_DONE
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "finished" and summary["steps"] == 49
    groups = summary["groups"]
    assert (groups["dispatched"], groups["trained"], groups["buffered"]) == (200, 196, 3)
    assert summary["group_reasons"] == {"dropped": {"prompt_too_long": 1}}
    assert_account_adds_up(summary)
