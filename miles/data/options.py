"""`data.options`: the settings of one source, read into that source's own frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from controllers.errors import ConfigError
from miles.registry import did_you_mean

T = TypeVar("T")


def read_options(into: type[T], options: Mapping[str, Any]) -> T:
    """Build the options dataclass `into`, whose annotations (pydantic's `Annotated` included) are enforced.

    Raises ConfigError naming `data.options.<key>` for an unknown key or a value that does not fit, and quoting it.
    """
    known = [field.name for field in fields(into)]  # type: ignore[arg-type]
    for key in options:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ConfigError(
                f"data.options.{key}: unknown key{hint} (value {options[key]!r})", key=f"data.options.{key}"
            )
    try:
        return TypeAdapter(into).validate_python(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["data", "options", *(str(part) for part in first["loc"])])
        raise ConfigError(f"{key}: {first['msg']}, not {first['input']!r}", key=key) from error
