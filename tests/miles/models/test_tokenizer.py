"""The tokenizer wrapper, over the byte-level tokenizer of the presets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from miles.models.byte_tokenizer import write_byte_tokenizer
from miles.models.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path, context_length=512)
    return tmp_path


def _random_text(generator: random.Random) -> str:
    """Any code points, surrogates left out: those are no characters and have no bytes."""
    limit = generator.choice([0x80, 0x800, 0x10000, 0x110000])
    points = [generator.randrange(limit) for _ in range(generator.randrange(40))]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def test_every_byte_is_a_token_whose_id_is_the_byte(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("".join(map(chr, range(128)))) == tuple(range(128))
    for text in map(chr, range(128, 0x800)):
        assert tokenizer.encode(text) == tuple(text.encode())


def test_any_text_is_its_utf8_and_comes_back_exactly(folder: Path) -> None:
    """Fails when the tokenizer normalises, adds a space or a token, or cuts at words and loses something."""
    tokenizer = load_tokenizer(folder)
    generator = random.Random(0)
    texts = ["", "x" * 10_000, " ", "\r\n\t\0", "  a  b  ", "é", "e\u0301", "\u2028\ufeff", "👩‍👩‍👧", "don't ."]
    texts += [_random_text(generator) for _ in range(2000)]
    for text in texts:
        assert tokenizer.encode(text) == tuple(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_read_by_name_and_left_out_of_text(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a<eos>b") == (97, 257, 98)
    assert tokenizer.decode([256, 97, 257, 98, 258, 259]) == "ab"


def test_what_a_random_model_writes_decodes_to_something(folder: Path) -> None:
    """Bytes that are no UTF-8, and ids beyond the tokenizer's (a model's embedding may have more rows)."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([0xFF, 97]) == "\ufffda"
    assert tokenizer.decode([97, 5000, 98]) == "ab"


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"generation_config.json": {"eos_token_id": [3, 4]}, "config.json": {"eos_token_id": 5}}, (3, 4)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"eos_token_id": None}}, (257,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (259,)),
        ({"tokenizer_config.json": {}}, ()),
    ],
)
def test_where_the_end_of_sequence_comes_from(
    folder: Path, files: dict[str, object], eos_ids: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert load_tokenizer(folder).eos_ids == eos_ids


def test_a_missing_or_broken_tokenizer_names_the_key_and_quotes_the_path(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: '.*/none' has no tokenizer\.json$"):
        load_tokenizer(folder / "none")
    (folder / "config.json").write_text('{"eos_token_id": ["end"]}')
    with pytest.raises(ConfigError, match=r"^model\.path: '.*' has a config\.json whose eos_token_id is \['end'\]"):
        load_tokenizer(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model\.path: '.*/config\.json' is not JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^model\.path: cannot read '.*/tokenizer\.json': "):
        load_tokenizer(folder)
