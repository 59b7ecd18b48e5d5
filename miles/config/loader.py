"""From a file and overrides to a RunConfig, with every fault as a ConfigError of one line a problem.

    configs/quickstart.yaml: trainer.optimizer.lr: must be a number, got 'abc'
    command line: unknown key 'engines.cuont', did you mean 'engines.count'?
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from controllers.errors import ConfigError
from miles.config import yaml_text
from miles.config.base import KeyProblem, Section, quote
from miles.config.checks import check_environment
from miles.config.schema import RunConfig

Overrides = Sequence[str] | Mapping[str, Any]

_TYPE_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "tuple_type": "must be a list",
    "too_long": "has too many entries",
    "path_type": "must be a path",
    "finite_number": "must be a finite number",
}
_REWORDED = (
    ("Input should be greater than or equal to", "must be at least"),
    ("Input should be less than or equal to", "must be at most"),
    ("Input should be greater than", "must be above"),
    ("Input should be less than", "must be below"),
    ("Input should", "must"),
)


def load_config(path: str | Path, overrides: Overrides = (), *, machine: bool = True) -> RunConfig:
    """Read the YAML at `path`, apply `overrides` and check the result, files that it names included.

    `overrides` are `key.path=value` strings, the value in YAML, or a mapping of dotted keys to values. A value
    replaces what the file holds under its key. Without `machine`, what the file names is not looked for: data of a run
    that is over may be gone. Raises ConfigError: one line a problem, with where it came from.
    """
    file = Path(path)
    document = _read(file)
    given = _pairs(overrides)
    origin = "overrides" if isinstance(overrides, Mapping) else "command line"
    for key, value in given.items():
        _set(document, key, value, origin)
    sources = _Sources(str(file), origin, tuple(given))
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        lines = [sources.describe(detail) for detail in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines)), path=str(file)) from error
    try:
        if machine:
            check_environment(config)
    except (KeyProblem, ConfigError) as error:
        key = error.key if isinstance(error, KeyProblem) else str(error.ids.get("key", ""))
        raise ConfigError(f"{sources.of(key)}: {error}", path=str(file), key=key) from error
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved YAML: every key with its value. `load_config` reads an equal config back."""
    return yaml_text.dump(config.model_dump(mode="json"))


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ConfigError(f"config file {str(file)!r} does not exist", path=str(file))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(file)!r} cannot be read: {error}", path=str(file)) from error
    document = yaml_text.parse(text, str(file))
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: must hold sections of keys, got {quote(document)}", path=str(file))
    return document


def _pairs(overrides: Overrides) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return dict(overrides)
    pairs: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"command line: expected key.path=value, got {item!r}", argument=item)
        pairs[key.strip()] = yaml_text.parse(text, f"command line: {key.strip()}")
    return pairs


def _set(document: dict[str, Any], key: str, value: Any, origin: str) -> None:
    *parents, last = key.split(".")
    section = document
    for depth, name in enumerate(parents):
        inner = section.get(name)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            above = ".".join(parents[: depth + 1])
            raise ConfigError(f"{origin}: unknown key {key!r}: {above!r} is a value, not a section", key=key)
        section[name] = section = dict(inner)
    section[last] = value


class _Sources:
    """Says where a key was set, and words pydantic's errors."""

    def __init__(self, file: str, override_origin: str, override_keys: Sequence[str]) -> None:
        self._file = file
        self._override_origin = override_origin
        self._override_keys = override_keys

    def of(self, key: str) -> str:
        """The file, or the origin of the override that set `key` or a key below or above it."""
        for given in self._override_keys:
            if key == given or key.startswith(given + ".") or given.startswith(key + "."):
                return self._override_origin
        return self._file

    def describe(self, detail: ErrorDetails) -> str:
        """One line for one error."""
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, KeyProblem):
            return f"{self.of(cause.key)}: {cause}"
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            return f"{self.of(key)}: unknown key {key!r}{_suggestion(key)} (value {quote(detail['input'])})"
        if detail["type"] == "missing":
            if isinstance(detail["loc"][-1], int):
                parent = key.rpartition(".")[0]
                return f"{self.of(parent)}: {parent}: has too few entries, got {quote(detail['input'])}"
            return f"{self.of(key)}: {key}: is required"
        problem = _TYPE_WORDS.get(detail["type"]) or str(cause or detail["msg"])
        for theirs, ours in _REWORDED:
            problem = problem.replace(theirs, ours)
        return f"{self.of(key)}: {key}: {problem}, got {quote(detail['input'])}"


def _suggestion(key: str) -> str:
    """`, did you mean ...?` for the known key that looks most like this one, near it or anywhere."""
    known = list(_keys(RunConfig))
    parent, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    by_name = {other.rpartition(".")[2]: other for other in known}
    for names in (siblings, by_name):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6 if names is siblings else 0.9)
        if close:
            return f", did you mean {names[close[0]]!r}?"
    return ""


def _keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a section, those of inner sections too."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                keys.extend(_keys(kind, f"{prefix}{name}."))
    return keys
