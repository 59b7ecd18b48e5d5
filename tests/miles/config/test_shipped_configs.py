"""Every file under configs/ and examples/ loads, and the quickstart says what the README promises of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.config import load_config

ROOT = Path(__file__).parents[3]
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_loads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load_config(file)


def test_the_quickstart_restarts_engines_a_third_into_the_run() -> None:
    config = load_config(ROOT / "configs/quickstart.yaml")
    assert config.inference.rolling_restart_at_step == config.train.steps // 3
    assert config.engines.count == 2
    assert config.inference.max_unavailable == 1
    assert config.train.warmup.steps > 0


def test_the_quickstart_takes_a_persons_own_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}=", "label": "{i}"}}\n' for i in range(20)))
    config = load_config(ROOT / "configs/quickstart.yaml", ["data.source=jsonl", f"data.path={prompts}"])
    assert config.data.path == prompts
