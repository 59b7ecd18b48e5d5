"""Text to token ids and back, for data and rewards: the `tokenizers` library without transformers (a fast import).

Invariant: no token is added at either end, so the ids of a prompt and of a completion can be joined as they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from controllers.errors import ConfigError


class Tokenizer:
    """The tokenizer of a model folder. Safe to use from several threads."""

    def __init__(self, fast: FastTokenizer, *, eos_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self.eos_ids = eos_ids
        """Ids that end a sequence; the first one closes supervised completions."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included. The model's embedding may have more rows."""
        return int(self._fast.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text`. The names of special tokens in it become those tokens, as in transformers."""
        return tuple(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out. Bytes that are not UTF-8 become the replacement character."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load `tokenizer.json` of a model folder and the end-of-sequence ids its other files name.

    Raises ConfigError, naming `model.path`, where the file is missing or cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model.path: {str(folder)!r} has no tokenizer.json", key="model.path")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for any fault in the file
        raise ConfigError(f"model.path: cannot read {str(file)!r}: {error}", key="model.path") from error
    return Tokenizer(fast, eos_ids=_eos_ids(folder, fast))


def _eos_ids(folder: Path, fast: FastTokenizer) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the token that tokenizer_config.json names; may be empty."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in ids):
            problem = f"has a {name} whose eos_token_id is {value!r}, not a token id or a list of them"
            raise ConfigError(f"model.path: {str(folder)!r} {problem}", key="model.path")
        if ids:
            return tuple(ids)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    found = fast.token_to_id(content) if isinstance(content, str) else None
    return () if found is None else (int(found),)


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file. Raises ConfigError where it is not an object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {str(file)!r} is not JSON: {error}", key="model.path") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {str(file)!r} does not hold a JSON object", key="model.path")
    return content
