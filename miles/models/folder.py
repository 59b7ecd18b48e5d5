"""What a Hugging Face model folder holds, read without torch. `miles check` and the assembly ask before a run starts.

Only headers are read, never the weights. Whatever is wrong is a ConfigError that names `model.path` and quotes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.errors import ConfigError
from miles.models.architecture import architecture_of, rope_of, unsupported

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
)
"""Keys of a config.json that hold a positive integer, where they hold anything."""
_FLAGS = ("tie_word_embeddings", "norm_topk_prob")
_NUMBERS = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")
"""Positive numbers, at the top or among the settings of the rotary positions."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model folder in short. `context_length` is in tokens; `parameters` counts a tied output head once."""

    architecture: str
    vocab_size: int
    context_length: int
    parameters: int


def inspect_model_folder(path: Path, *, embedded: bool = False) -> ModelInfo:
    """Check that a folder can be trained (and, with `embedded`, served by the embedded engine) and say what is in it.

    Raises ConfigError for: no folder, no config.json, an unsupported model, no safetensors weights or a file of
    them that is missing or cut short, no tokenizer.json.
    """
    if not path.is_dir():
        raise _fault(path, "is not a folder")
    config = read_config(path)
    if (problem := unsupported(config, embedded=embedded)) is not None:
        raise _fault(path, problem)
    vocab_size = _positive(path, config, "vocab_size")
    context_length = _positive(path, config, "max_position_embeddings")
    parameters = sum(_count_parameters(path, file) for file in weight_files(path))
    if not (path / "tokenizer.json").is_file():
        raise _fault(path, "has no tokenizer.json")
    return ModelInfo(architecture_of(config), vocab_size, context_length, parameters)


def _fault(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"model.path: {str(path)!r} {problem}", key="model.path")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a model folder's config.json. Raises ConfigError for none, and for sizes that are no numbers."""
    if not (path / "config.json").is_file():
        raise _fault(path, "has no config.json")
    config = _read_object(path, "config.json")
    for key, value, wanted in _wrong_values(config):
        raise _fault(path, f"has a config.json whose {key} is {value!r}, not {wanted}")
    return config


def _wrong_values(config: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """(key, value, what it should be) of values of the wrong type; absent and null ones stand for a default."""
    given = {key: value for key, value in {**rope_of(config), **config}.items() if value is not None}
    for key in given:
        value = given[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in _COUNTS and not (number and isinstance(value, int) and value > 0):
            yield key, value, "a positive integer"
        elif key == "num_experts" and not (number and isinstance(value, int) and value >= 0):
            yield key, value, "an integer"
        elif key in _NUMBERS and not (number and value > 0):
            yield key, value, "a positive number"
        elif key in _FLAGS and not isinstance(value, bool):
            yield key, value, "true or false"
        elif key == "layer_types" and not isinstance(value, list):
            yield key, value, "a list"


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _fault(path, f"has an unreadable {name}: {error}") from error
    if not isinstance(content, dict):
        raise _fault(path, f"has a {name} that does not hold a JSON object")
    return content


def _positive(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise _fault(path, f"has a config.json whose {key} is {value!r}, not a positive integer")
    return value


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files: the only one, or those that the index lists. Raises ConfigError for none."""
    if (path / ONE_FILE).is_file():
        return [ONE_FILE]
    if not (path / INDEX).is_file():
        raise _fault(path, f"has no weights ({ONE_FILE} or {INDEX})")
    weight_map = _read_object(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _fault(path, f"has a {INDEX} without a weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not (path / name).is_file():
            raise _fault(path, f"lacks {name}, which its {INDEX} lists")
    return names


def _count_parameters(path: Path, name: str) -> int:
    """Elements of all tensors in a safetensors file, whose size must be what its header says."""
    file = path / name
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise _fault(path, f"has a {name} that is not a safetensors file")
        try:
            header = json.loads(stream.read(header_bytes))
            tensors = [entry for key, entry in header.items() if key != "__metadata__"]
            end = max((entry["data_offsets"][1] for entry in tensors), default=0)
            elements = sum(int(math.prod(entry["shape"])) for entry in tensors)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _fault(path, f"has a {name} whose header cannot be read") from error
    expected = 8 + header_bytes + end
    if file.stat().st_size != expected:
        raise _fault(path, f"has a {name} of {file.stat().st_size} bytes where its header says {expected}")
    if not tensors:
        raise _fault(path, f"has a {name} without tensors")
    return elements
