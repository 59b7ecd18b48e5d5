"""The files under examples/ are what the product reads: a data file of 200 rows, and a reward of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.data.registry import open_source
from miles.rewards.reward import Place, load_reward
from tests.fakes.byte_encoder import ByteEncoder

ROOT = Path(__file__).parents[2]


def test_upper_case_has_200_rows_without_a_fault() -> None:
    source = open_source("jsonl", tokenizer=ByteEncoder(), seed=0, path=ROOT / "examples" / "upper_case.jsonl")
    prompts = source.train()
    rows = source.evaluation(200) + [prompt for _ in range(180) if (prompt := prompts.next()) is not None]
    assert len({row.text for row in rows}) == 200
    assert all(row.label == row.text.removesuffix("=").upper() for row in rows)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("ABC", "ABC", 1.0), (" ABD\n", "ABC", 2 / 3), ("ABCABC", "ABC", 0.5), ("", "ABC", 0.0), ("ABC", "", None)],
)
def test_partial_credit(
    response: str, label: str, reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = load_reward("examples.partial_credit:share_of_characters")
    assert found.place is Place.PROCESS
    assert found.call("abc=", response, label, {}) == reward
