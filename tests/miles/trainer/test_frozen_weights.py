"""FrozenRank: what it reads of a folder, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from controllers.errors import ConfigError
from miles.models.presets import write_preset
from miles.trainer.frozen_weights import FrozenRank
from miles.trainer.options import TrainerOptions


def names(folder: Path) -> set[str]:
    rank = FrozenRank(TrainerOptions(folder))
    rank.open()
    return {shard.name for shard in rank.shards()}


def test_a_tied_head_is_not_published_and_one_of_its_own_is(tmp_path: Path) -> None:
    """Fails when whatever the files hold is published: engines have no parameter of that name."""
    folder = write_preset("tiny-qwen3", tmp_path)
    stored = load_file(folder / "model.safetensors")
    head = np.copy(stored["model.embed_tokens.weight"])
    save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors")
    assert names(folder) == set(stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert names(folder) == {*stored, "lm_head.weight"}


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = write_preset("tiny-qwen3", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read '.*/model\.safetensors': "):
        names(tmp_path)
