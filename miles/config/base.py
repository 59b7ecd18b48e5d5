"""What every section of the YAML is made of: a frozen pydantic model that refuses unknown keys and loose types.

The sentence under each field is its documentation (`miles.config.reference` writes the page from it).
A check that involves several keys raises `KeyProblem`, which names the key that is to be changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class KeyProblem(ValueError):
    """A value that is impossible next to others. `key` is the dotted key, `value` what it holds (None: null)."""

    def __init__(self, key: str, problem: str, value: object) -> None:
        super().__init__(f"{key}: {problem}, got {quote(value)}")
        self.key = key


def quote(value: object) -> str:
    """A value as YAML would have it, for an error; cut where it is long."""
    text = repr(str(value)) if isinstance(value, str | Path) else json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=False,
    )


def _only_one(value: int) -> int:
    if value != 1:
        raise ValueError("only 1 is supported by this version")
    return value


FilePath = Annotated[Path, Field(strict=False)]
"""A path; relative ones start from the working directory. Existence is checked in `miles.config.checks`."""

OnlyOne = Annotated[int, AfterValidator(_only_one)]
"""A size that the schema names and this version cannot change."""

Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean: 1 would never take in anything."""
