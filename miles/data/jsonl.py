"""The source `jsonl`: a person's own prompts and labels, shuffled anew in every epoch.

The order of an epoch is a function of the seed and the epoch alone. Rows are held out by their prompt, so that a
prompt that stands in the file twice is never on both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

from pydantic import Field

from controllers.errors import ConfigError
from executors.trajectory import Prompt
from miles.data.jsonl_file import JsonlFile, Row
from miles.data.source import PromptCursor, TextEncoder, TokenPair, completion_ids

log = logging.getLogger(__name__)  # structlog joins it in a run; loading that here would slow `miles check`

_WARMUP_TRIES_PER_EXAMPLE = 10


@dataclass(frozen=True, slots=True)
class JsonlOptions:
    """`data.options` of `jsonl`."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """How often every training row is used; without it, as long as the run lasts."""


@dataclass(frozen=True, slots=True)
class JsonlRows:
    """The rows of a run, read and divided. No prompt is in both, unless `eval_path` repeats one of `path`."""

    train: tuple[Row, ...]
    evaluation: tuple[Row, ...]


def read_rows(
    path: Path, *, prompt_key: str, label_key: str, eval_path: Path | None, eval_fraction: float, seed: int
) -> JsonlRows:
    """Read and divide the rows; raises ConfigError for faulty files and where nothing is left to train on.

    With `eval_path` its rows are held out, else a fraction of the different prompts of `path`, at least one if the
    fraction is above 0.
    """
    rows = JsonlFile(path, prompt_key, label_key).read()
    if eval_path is not None:
        held_out = JsonlFile(eval_path, prompt_key, label_key, path_key="data.eval_path").read()
        shared = {row.prompt for row in rows} & {row.prompt for row in held_out}
        if shared:
            log.warning("%d prompts are both trained and evaluated, the first %r", len(shared), min(shared))
        return JsonlRows(tuple(rows), tuple(held_out))
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    Random(f"jsonl/{seed}/held_out").shuffle(prompts)
    count = max(1, round(eval_fraction * len(prompts))) if eval_fraction > 0 else 0
    if count >= len(prompts):
        raise ConfigError(
            f"data.eval_fraction: {eval_fraction} of {len(prompts)} different prompts in {str(path)!r} leaves none"
            " to train on",
            key="data.eval_fraction",
        )
    place = {prompt: index for index, prompt in enumerate(prompts[:count])}
    held_out = sorted((row for row in rows if row.prompt in place), key=lambda row: place[row.prompt])
    return JsonlRows(tuple(row for row in rows if row.prompt not in place), tuple(held_out))


class Jsonl:
    """Prompts from a file. Prompts are tokenized when they are asked for."""

    def __init__(self, rows: JsonlRows, options: JsonlOptions, *, encoder: TextEncoder, seed: int) -> None:
        self._rows = rows
        self._epochs = options.epochs
        self._encoder = encoder
        self._seed = seed
        self._order_of: tuple[int, Sequence[int]] = (-1, ())

    def train(self, *, start: int = 0) -> PromptCursor:
        """Every row once an epoch. Ends after `epochs`, if they are limited."""
        return PromptCursor(self._train_prompt, start=start)

    def evaluation(self, count: int) -> list[Prompt]:
        """The first `count` held-out rows, each once."""
        return [self._prompt(index, row) for index, row in enumerate(self._rows.evaluation[:count])]

    def warmup_examples(self, count: int, step: int, *, max_tokens: int | None = None) -> list[TokenPair]:
        """Training rows drawn at random with their labels as completions; the draw depends on the seed and `step`."""
        random = Random(f"jsonl/{self._seed}/warmup/{step}")
        pairs: list[TokenPair] = []
        for _ in range(_WARMUP_TRIES_PER_EXAMPLE * count):
            if len(pairs) == count:
                break
            row = random.choice(self._rows.train)
            pair = self._encoder.encode(row.prompt), completion_ids(self._encoder, row.label)
            if max_tokens is None or len(pair[0]) + len(pair[1]) <= max_tokens:
                pairs.append(pair)
        return pairs

    def _train_prompt(self, index: int) -> Prompt | None:
        epoch, place = divmod(index, len(self._rows.train))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self._prompt(index, self._rows.train[self._order(epoch)[place]])

    def _order(self, epoch: int) -> Sequence[int]:
        if self._order_of[0] != epoch:
            order = list(range(len(self._rows.train)))
            Random(f"jsonl/{self._seed}/epoch/{epoch}").shuffle(order)
            self._order_of = (epoch, order)
        return self._order_of[1]

    def _prompt(self, index: int, row: Row) -> Prompt:
        return Prompt(
            index=index,
            ids=self._encoder.encode(row.prompt),
            label=row.label,
            text=row.prompt,
            extra=row.extra,
        )
