"""Writes docs/configuration.md from the models: every key with its type, default and sentence.

    python -m miles.config.reference > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles.config.base import Section
from miles.config.schema import RunConfig

_HEAD = """# Configuration

Every key of the YAML file, written from the models in `miles/config` by `python -m miles.config.reference`.
On the command line a key is given as `section.key=value`, with the value in YAML.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    plain, sections = _split(RunConfig)
    parts = [_HEAD, "## Top level\n", *_table(plain)]
    for name, section in sections:
        parts += _section(name, section)
    return "\n".join(parts) + "\n"


def _section(name: str, section: type[Section]) -> Iterator[str]:
    plain, inner = _split(section)
    about = (section.__doc__ or "").strip()
    yield f"\n## {name}\n\n{about}\n"
    yield from _table([(f"{name}.{key}", field) for key, field in plain])
    for key, below in inner:
        yield from _section(f"{name}.{key}", below)


def _split(section: type[Section]) -> tuple[list[tuple[str, FieldInfo]], list[tuple[str, type[Section]]]]:
    plain: list[tuple[str, FieldInfo]] = []
    inner: list[tuple[str, type[Section]]] = []
    for key, field in section.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        section_of = [kind for kind in kinds if issubclass(kind, Section)]
        inner += [(key, kind) for kind in section_of]
        if not section_of or NoneType in kinds:
            plain.append((key, field))
    return plain, inner


def _table(fields: list[tuple[str, FieldInfo]]) -> Iterator[str]:
    if not fields:
        return
    yield "| key | type | default | |\n| --- | --- | --- | --- |"
    for key, field in fields:
        about = " ".join((field.description or "").split())
        yield f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {about} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (tuple, dict):
        return {tuple: "list", dict: "mapping"}[get_origin(annotation)]
    others = [each for each in get_args(annotation) if each is not NoneType]
    if others:
        return " or ".join(_type(each) for each in others) + " or null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {int: "whole number", float: "number", str: "string", bool: "true, false"}.get(annotation, "path")


if __name__ == "__main__":
    print(reference(), end="")
