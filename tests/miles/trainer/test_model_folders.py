"""Reading and writing Hugging Face folders, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from controllers.errors import ConfigError
from miles.trainer import weights
from miles.trainer.architecture import read_architecture
from miles.trainer.folders import new_folder
from miles.trainer.model import build_model
from miles.trainer.safetensors_folder import FolderReader, write_folder
from tests.miles.trainer.tiny import checkpoint_names, hf_tensors, learner, random_batch, reference, write_model

pytestmark = pytest.mark.usefixtures("megatron")

GATE = "model.layers.1.mlp.gate_proj.weight"


def loaded(folder: Path) -> dict[str, Tensor]:
    """The parameters of a folder's model."""
    arch = read_architecture(folder)
    parameters = dict(build_model(arch).named_parameters())
    weights.load_hf(parameters, folder, arch)
    return parameters


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3", True), ("qwen2", False), ("qwen3_moe", False), ("gemma", True)]
)
def test_exporting_what_was_loaded_gives_the_same_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    source, target = write_model(tmp_path / "model", kind, tied=tied), tmp_path / "out"
    (source / "tokenizer.json").write_text("{}")
    weights.export_hf(loaded(source), read_architecture(source), source, target)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in source.iterdir())
    assert (target / "tokenizer.json").read_text() == "{}"
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"


def test_transformers_loads_a_trained_export(tmp_path: Path) -> None:
    trained = learner(write_model(tmp_path / "model"))
    trained.step(random_batch(1))
    trained.export(tmp_path / "out")
    exported = dict(reference(tmp_path / "out").named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in hf_tensors(trained).items())


def test_a_large_model_is_written_and_read_in_several_files(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "model", "qwen3_moe", tied=False), tmp_path / "out"
    parameters, arch = loaded(source), read_architecture(source)
    write_folder(weights.global_tensors(parameters, arch), source, target, max_file_bytes=20_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    sizes = [sum(tensor.nbytes for tensor in load_file(target / name).values()) for name in files]
    assert max(sizes) <= 20_000 and sum(sizes) == index["metadata"]["total_size"]
    again = loaded(target)
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)
    exported = checkpoint_names(reference(target).named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.global_tensors(parameters, arch))


def test_what_transformers_writes_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    whole = loaded(source)
    model = reference(source)
    (source / "model.safetensors").unlink()
    model.save_pretrained(source, max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").is_file()
    again = loaded(source)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_experts_are_read_also_where_they_are_fused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", "qwen3_moe", tied=False)
    whole = loaded(source)
    save_file(dict(reference(source).state_dict()), source / "model.safetensors", metadata={"format": "pt"})
    with FolderReader(source) as reader:
        assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(source / "model.safetensors")
        up = reader.read("model.layers.0.mlp.experts.3.up_proj.weight", (24, 32), ((5, 2), (1, 3)))
        with pytest.raises(ConfigError, match=r"lacks the tensor 'model\.layers\.9\.mlp\.experts\.0\.down_proj"):
            reader.read("model.layers.9.mlp.experts.0.down_proj.weight", (32, 24), ((0, 32), (0, 24)))
    fused = load_file(source / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(up, fused[3, 24 + 5 : 24 + 7, 1:4])
    again = loaded(source)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_box_is_read_without_the_rest(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    with FolderReader(source) as reader:
        part = reader.read(GATE, (48, 32), ((10, 4), (0, 32)))
    assert torch.equal(part, load_file(source / "model.safetensors")[GATE][10:14])


def test_export_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    """Fails without refuse_occupied in folders.new_folder."""
    source = write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("only copy")
    with pytest.raises(ConfigError, match="not empty"):
        weights.export_hf(loaded(source), read_architecture(source), source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_folder_that_fails_half_way_is_absent(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), new_folder(tmp_path / "out") as folder:
        (folder / "part").write_text("x")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_missing_weights_are_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        loaded(source)
    with pytest.raises(ConfigError, match=re.escape("config.json")):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tie_word_embeddings": False}, "lacks the tensor 'lm_head.weight'"),
        ({"intermediate_size": 40}, r"gate_proj\.weight has shape \(48, 32\), config\.json says \(40, 32\)"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    source = write_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=problem):
        loaded(source)


def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path) -> None:
    """Which those are is in tests/miles/models/test_architecture."""
    source = write_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ConfigError, match=r"model\.path: '.*' has a config\.json with hidden_act='gelu'"):
        read_architecture(source)
