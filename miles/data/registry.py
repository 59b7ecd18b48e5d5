"""Opens the source that `data.source` names: a built-in, or a person's own `package.module:function`.

Called by the assembly (`open_source`) and by `miles check` (`check_source`, which needs no tokenizer).
A person's function takes the arguments of `open_source` after the name, all by keyword, and returns a DataSource.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from controllers.errors import ConfigError
from miles.data.jsonl import Jsonl, JsonlOptions, JsonlRows, read_rows
from miles.data.options import read_options
from miles.data.sort_digits import SortDigits, SortDigitsOptions
from miles.data.source import DataSource, TextEncoder
from miles.registry import resolve


class SourceFactory(Protocol):
    """Makes a source. Raises ConfigError for settings it cannot use."""

    def __call__(
        self,
        *,
        tokenizer: TextEncoder,
        seed: int,
        path: Path | None,
        prompt_key: str,
        label_key: str,
        eval_path: Path | None,
        eval_fraction: float,
        options: Mapping[str, Any],
    ) -> DataSource: ...


def open_source(
    name: str,
    *,
    tokenizer: TextEncoder,
    seed: int,
    path: str | Path | None = None,
    prompt_key: str = "prompt",
    label_key: str = "label",
    eval_path: str | Path | None = None,
    eval_fraction: float = 0.1,
    options: Mapping[str, Any] | None = None,
) -> DataSource:
    """Open a source; the same arguments give the same prompts. Raises ConfigError naming the key at fault."""
    return _factory(name)(
        tokenizer=tokenizer,
        seed=seed,
        path=None if path is None else Path(path),
        prompt_key=prompt_key,
        label_key=label_key,
        eval_path=None if eval_path is None else Path(eval_path),
        eval_fraction=eval_fraction,
        options=options or {},
    )


def check_source(
    name: str,
    *,
    path: str | Path | None = None,
    prompt_key: str = "prompt",
    label_key: str = "label",
    eval_path: str | Path | None = None,
    eval_fraction: float = 0.1,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Raise the ConfigError that `open_source` would. A person's own source is imported, but not opened.

    `miles check` asks for built-in sources only, so as to import nothing of a person's.
    """
    _factory(name)
    if name in _BUILTIN:
        open_source(
            name,
            tokenizer=_NoTokens(),
            seed=0,
            path=path,
            prompt_key=prompt_key,
            label_key=label_key,
            eval_path=eval_path,
            eval_fraction=eval_fraction,
            options=options,
        )


def _factory(name: str) -> SourceFactory:
    factory = resolve("data.source", name, _BUILTIN)
    if not callable(factory):
        raise ConfigError(f"data.source: {name!r} is not a function", key="data.source")
    return cast(SourceFactory, factory)


class _NoTokens:
    """Stands in while a source is opened only to see whether it can be: opening one encodes nothing."""

    eos_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> tuple[int, ...]:
        raise AssertionError("opening a source must not tokenize")


def _open_sort_digits(
    *, tokenizer: TextEncoder, seed: int, path: Path | None, options: Mapping[str, Any], **_: Any
) -> DataSource:
    if path is not None:
        problem = f"the source sort_digits reads no file, but this is {str(path)!r} (data.source=jsonl would)"
        raise ConfigError(f"data.path: {problem}", key="data.path")
    return SortDigits(read_options(SortDigitsOptions, options), encoder=tokenizer, seed=seed)


def _open_jsonl(
    *,
    tokenizer: TextEncoder,
    seed: int,
    path: Path | None,
    prompt_key: str,
    label_key: str,
    eval_path: Path | None,
    eval_fraction: float,
    options: Mapping[str, Any],
) -> DataSource:
    settings = read_options(JsonlOptions, options)
    if path is None:
        raise ConfigError("data.path: the jsonl source needs a file, not None", key="data.path")
    rows: JsonlRows = read_rows(
        path,
        prompt_key=prompt_key,
        label_key=label_key,
        eval_path=eval_path,
        eval_fraction=eval_fraction,
        seed=seed,
    )
    return Jsonl(rows, settings, encoder=tokenizer, seed=seed)


_BUILTIN: dict[str, Callable[..., DataSource]] = {"sort_digits": _open_sort_digits, "jsonl": _open_jsonl}
