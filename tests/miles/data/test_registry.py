"""data.source: built-ins by name, a person's own by dotted name, and what is said about a wrong one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from controllers.errors import ConfigError
from executors.trajectory import Prompt
from miles.data.registry import check_source, open_source
from miles.data.source import PromptCursor, TextEncoder, TokenPair
from tests.fakes.byte_encoder import ByteEncoder


class _Squares:
    """A person's own source."""

    def __init__(self, encoder: TextEncoder, limit: int) -> None:
        self._encoder = encoder
        self._limit = limit

    def train(self, *, start: int = 0) -> PromptCursor:
        return PromptCursor(self._prompt, start=start)

    def evaluation(self, count: int) -> list[Prompt]:
        return []

    def warmup_examples(self, count: int, step: int, *, max_tokens: int | None = None) -> list[TokenPair]:
        return []

    def _prompt(self, index: int) -> Prompt | None:
        if index >= self._limit:
            return None
        return Prompt(index, self._encoder.encode(f"{index}^2="), str(index**2))


def open_squares(*, tokenizer: TextEncoder, options: dict[str, Any], **_: Any) -> _Squares:
    return _Squares(tokenizer, options["limit"])


NOT_A_FUNCTION = 3


def test_a_source_of_ones_own() -> None:
    name = f"{__name__}:open_squares"
    check_source(name, options={"limit": 2})
    prompts = open_source(name, tokenizer=ByteEncoder(), seed=0, options={"limit": 2}).train(start=1)
    assert prompts.next() == Prompt(1, tuple(b"1^2="), "1")
    assert prompts.next() is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sort_digit", r"^data\.source: unknown name 'sort_digit'; did you mean 'sort_digits'\?"),
        ("json", r"^data\.source: unknown name 'json'; did you mean 'jsonl'\?"),
        ("nowhere.at_all:f", r"^data\.source: 'nowhere\.at_all:f': cannot import 'nowhere\.at_all' \(ModuleNotFound"),
        (f"{__name__}:open_square", r"^data\.source: .* has no 'open_square'; did you mean 'open_squares'\?"),
        (f"{__name__}:NOT_A_FUNCTION", r"^data\.source: .* is not a function$"),
        (":f", r"^data\.source: ':f' is not of the form package\.module:function$"),
    ],
)
def test_a_wrong_name_is_quoted_with_the_nearest_right_one(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_source(name)


@pytest.mark.real
def test_checking_data_imports_no_torch() -> None:
    code = (
        "import sys; from miles.data.registry import check_source; check_source('sort_digits');"
        "import miles.rewards.reward, miles.models.folder, miles.models.presets, miles.models.tokenizer;"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
