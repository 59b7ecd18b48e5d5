"""The presets: size, determinism, and that transformers reads what was written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from controllers.errors import ConfigError
from miles.models.folder import ModelInfo, inspect_model_folder
from miles.models.presets import PRESETS, preset_shape, write_preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_under_a_million_parameters(name: str, tmp_path: Path) -> None:
    folder = write_preset(name, tmp_path / "new" / "model")
    assert folder == tmp_path / "new" / "model"
    info = inspect_model_folder(folder)
    assert info == ModelInfo("Qwen3ForCausalLM", 260, preset_shape(name).context_length, info.parameters)
    assert info.parameters < 1_000_000


def test_tiny_qwen3_is_the_size_it_is_documented_with(tmp_path: Path) -> None:
    assert inspect_model_folder(write_preset("tiny-qwen3", tmp_path)).parameters == 328_960


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    first, again, other = (
        write_preset("tiny-qwen3", tmp_path / name, seed=seed) for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    names = sorted(file.name for file in first.iterdir())
    assert names == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes()
        assert ((first / name).read_bytes() == (other / name).read_bytes()) == (name != "model.safetensors")


def test_no_global_random_state_is_touched(tmp_path: Path) -> None:
    """Fails when `initial_weights` draws from a global generator."""
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.random())
    random.seed(5)
    np.random.seed(5)
    write_preset("tiny-qwen3", tmp_path)
    assert (random.random(), np.random.random()) == expected


def test_weights_are_normal_and_norms_are_one(tmp_path: Path) -> None:
    for name, tensor in load_file(write_preset("tiny-qwen3", tmp_path) / "model.safetensors").items():
        assert tensor.dtype == np.float32
        if tensor.ndim == 1:
            assert (tensor == 1).all(), name
        else:
            assert abs(tensor.std() - 0.05) < 0.002 and abs(tensor.mean()) < 0.001, name


def test_the_end_of_sequence_is_in_both_configurations(tmp_path: Path) -> None:
    folder = write_preset("tiny-qwen3", tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == 257


def test_an_unknown_preset_is_quoted_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.preset: unknown preset 'tiny-qwen'; did you mean 'tiny-qwen3'\?"):
        write_preset("tiny-qwen", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.real
def test_transformers_loads_it_whole(tmp_path: Path) -> None:
    """With no parameter missing, left over or of another shape; and its tokenizer agrees with ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from miles.models.tokenizer import load_tokenizer

    folder = write_preset("tiny-qwen3", tmp_path)
    # With this flag it returns a pair, which its annotation does not say.
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.num_parameters() == 328_960
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 257

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (257, 256, None)
    for text in ("4132=1234", " two  spaces , a full stop . ", "naïve 世界 🙂\n", "a<eos>b<|im_end|>"):
        assert tuple(theirs(text).input_ids) == ours.encode(text)
    logits = model(torch.tensor([ours.encode("4132=")])).logits
    assert logits.shape == (1, 5, 260) and bool(logits.isfinite().all())
