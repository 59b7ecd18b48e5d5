"""Reading and writing Hugging Face folders, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from controllers.errors import ConfigError
from miles.trainer.folders import new_folder
from miles.trainer.model import read_architecture
from miles.trainer.weights import read_folder
from tests.miles.trainer.tiny import hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False)])
def test_exporting_what_was_loaded_gives_the_same_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    source = write_model(tmp_path / "model", kind, tied=tied)
    (source / "tokenizer.json").write_text("{}")
    learner(source).export(tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_transformers_loads_a_trained_export(tmp_path: Path) -> None:
    trained = learner(write_model(tmp_path / "model"))
    trained.step(random_batch(1))
    trained.export(tmp_path / "out")
    exported = dict(reference(tmp_path / "out").named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in hf_tensors(trained).items())


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    model = reference(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    found = read_folder(source, read_architecture(source))
    assert all(torch.equal(found[name], tensor) for name, tensor in model.named_parameters())


def test_export_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    """Fails without refuse_occupied in folders.new_folder."""
    trained = learner(write_model(tmp_path / "model"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("only copy")
    with pytest.raises(ConfigError, match="not empty"):
        trained.export(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_folder_that_fails_half_way_is_absent(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), new_folder(tmp_path / "out") as folder:
        (folder / "part").write_text("x")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_missing_weights_are_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    arch = read_architecture(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors weights"):
        read_folder(source, arch)
    with pytest.raises(ConfigError, match=re.escape("config.json")):
        read_architecture(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    untied = write_model(tmp_path / "model", tied=True)
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        read_folder(untied, read_architecture(untied))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'yarn'"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    source = write_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=re.escape(named)):
        read_architecture(source)
