"""inspect_model_folder: every fault of a model folder in one line that names model.path and quotes the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from controllers.errors import ConfigError
from miles.models.folder import inspect_model_folder
from miles.models.presets import write_preset

NOT_SAFETENSORS = "has a model.safetensors that is not a safetensors file"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_preset("tiny-qwen3", tmp_path / "model")


def _set(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def _write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _without_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")


def _index(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content)

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_remove("config.json"), "has no config.json"),
        (_write("config.json", "{"), "has an unreadable config.json: "),
        (_write("config.json", "[]"), "has a config.json that does not hold a JSON object"),
        (_set(architectures=["MambaForCausalLM"]), "is of architecture 'MambaForCausalLM'; supported: Qwen3"),
        (_set(architectures=None), "is of architecture 'none'; supported: Qwen3ForCausalLM"),
        (_set(rope_scaling={"rope_type": "yarn"}), "has a config.json with rope_type='yarn'; supported: 'default', "),
        (_set(attention_bias=True), "has a config.json with attention_bias=True; supported: False"),
        (_set(vocab_size="260"), "has a config.json whose vocab_size is '260', not a positive integer"),
        (_set(max_position_embeddings=0), "has a config.json whose max_position_embeddings is 0, "),
        (_set(vocab_size=None), "has a config.json whose vocab_size is None, not a positive integer"),
        (_set(hidden_size=128.0), "has a config.json whose hidden_size is 128.0, not a positive integer"),
        (_set(num_hidden_layers=True), "has a config.json whose num_hidden_layers is True, not a positive integer"),
        (_set(num_experts="8"), "has a config.json whose num_experts is '8', not an integer"),
        (_set(rms_norm_eps="1e-6"), "has a config.json whose rms_norm_eps is '1e-6', not a positive number"),
        (_set(rope_scaling={"factor": "2"}), "has a config.json whose factor is '2', not a positive number"),
        (_set(tie_word_embeddings="no"), "has a config.json whose tie_word_embeddings is 'no', not true or false"),
        (_set(layer_types=1), "has a config.json whose layer_types is 1, not a list"),
        (_remove("model.safetensors"), "has no weights (model.safetensors or model.safetensors.index.json)"),
        (_write("model.safetensors", "version https://git-lfs"), NOT_SAFETENSORS),
        (_write("model.safetensors", b""), NOT_SAFETENSORS),
        (_write("model.safetensors", b"\2" + b"\0" * 7 + b"[]"), "has a model.safetensors whose header cannot be read"),
        (_cut_short, "has a model.safetensors of 1318351 bytes where its header says 1318352"),
        (_without_tensors, "has a model.safetensors without tensors"),
        (_index("{}"), "has a model.safetensors.index.json without a weight_map"),
        (_index('{"weight_map": {"a": "b.safetensors"}}'), "lacks b.safetensors, which its "),
        (_remove("tokenizer.json"), "has no tokenizer.json"),
    ],
)
def test_a_fault_is_named(folder: Path, change: Callable[[Path], None], problem: str) -> None:
    change(folder)
    with pytest.raises(ConfigError) as caught:
        inspect_model_folder(folder)
    assert caught.value.message.startswith(f"model.path: {str(folder)!r} {problem}")
    assert "\n" not in caught.value.message


def test_what_is_trained_but_not_served_is_refused_where_the_embedded_engine_serves(folder: Path) -> None:
    _set(rope_scaling={"rope_type": "linear", "factor": 2.0})(folder)
    assert inspect_model_folder(folder).architecture == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match="rope_type='linear'; the embedded engine serves: 'default'"):
        inspect_model_folder(folder, embedded=True)


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: 'Qwen/Qwen3-0\.6B' is not a folder$"):
        inspect_model_folder(Path("Qwen/Qwen3-0.6B"))


def test_weights_in_several_files_are_counted_together(folder: Path) -> None:
    whole = inspect_model_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts: dict[str, dict[str, np.ndarray[Any, Any]]] = {"one.safetensors": {}, "two.safetensors": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        parts[list(parts)[index % 2]][name] = tensor
    for file, part in parts.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect_model_folder(folder) == whole
