"""The procedural task `sort_digits`: `4132=` wants `1234`. Made on the spot, without a file and without an end.

A tenth of all digit strings is held out, by a hash of the seed and the digits: a membership test that needs no table,
so any length works and training, warm-up and evaluation cannot overlap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field

from executors.trajectory import Prompt
from miles.data.source import PromptCursor, TextEncoder, TokenPair, completion_ids

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, slots=True)
class SortDigitsOptions:
    """`data.options` of `sort_digits`."""

    digits: Annotated[int, Field(ge=2, le=64)] = 4
    """How many digits there are to sort, each drawn from 0 to 9."""


class SortDigits:
    """Strings of digits and the same digits in ascending order. The text is one ASCII character per digit and `=`."""

    def __init__(self, options: SortDigitsOptions, *, encoder: TextEncoder, seed: int) -> None:
        self._digits = options.digits
        self._encoder = encoder
        self._seed = seed

    def train(self, *, start: int = 0) -> PromptCursor:
        """Endless; digits are drawn anew for every position, so strings come again."""
        return PromptCursor(lambda index: self._prompt(index, self._draw(self._random("train", index))), start=start)

    def evaluation(self, count: int) -> list[Prompt]:
        """`count` held-out prompts, each once; fewer where so many are not held out."""
        held_out = (digits for digits in self._all_digits() if self.is_held_out(digits))
        return [self._prompt(index, digits) for index, digits in zip(range(count), held_out, strict=False)]

    def warmup_examples(self, count: int, step: int, *, max_tokens: int | None = None) -> list[TokenPair]:
        """`count` examples, drawn anew for every step. All have the same length: none, where that is too long."""
        random = self._random("warmup", step)
        pairs = []
        for _ in range(count):
            digits = self._draw(random)
            pairs.append((self._encoder.encode(f"{digits}="), completion_ids(self._encoder, _answer(digits))))
        return [pair for pair in pairs if max_tokens is None or len(pair[0]) + len(pair[1]) <= max_tokens]

    def is_held_out(self, digits: str) -> bool:
        """Whether a string of digits is for evaluation only."""
        digest = hashlib.blake2b(f"{self._seed}/{digits}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0

    def _random(self, purpose: str, number: int) -> Random:
        return Random(f"sort_digits/{self._seed}/{self._digits}/{purpose}/{number}")

    def _draw(self, random: Random) -> str:
        while True:
            digits = "".join(random.choices("0123456789", k=self._digits))
            if not self.is_held_out(digits):
                return digits

    def _all_digits(self) -> Iterator[str]:
        """Every string once, in an order that depends on the seed: a stride without a common factor with the total."""
        total = 10**self._digits
        random = self._random("evaluation", 0)
        number, stride = random.randrange(total), 10 * random.randrange(total // 10) + 7
        for _ in range(total):
            yield f"{number:0{self._digits}d}"
            number = (number + stride) % total

    def _prompt(self, index: int, digits: str) -> Prompt:
        text = f"{digits}="
        return Prompt(index=index, ids=self._encoder.encode(text), label=_answer(digits), text=text)


def _answer(digits: str) -> str:
    return "".join(sorted(digits))
