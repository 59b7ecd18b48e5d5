"""YAML text to plain values and back, with the scalars of YAML 1.2: `1e-5` is a number, `yes` is a string.

PyYAML follows YAML 1.1, where a float needs a dot and a signed exponent. A key given twice is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from controllers.errors import ConfigError

_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$"
    r"|\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"(?:~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema of YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if text.startswith(("0o", "0x")):
            return int(text, 0)
        return int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node)).lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1 that the class inherits
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the loader above, or one of YAML 1.1, would not read back as a string."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str, origin: str) -> Any:
    """Parse one document. Raises ConfigError with `origin` and the line and column of the fault."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = error.problem or error.context or "not YAML"
        raise ConfigError(f"{origin}: {place}{problem}", origin=origin) from error
    except (yaml.YAMLError, ValueError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{origin}: not YAML: {detail}", origin=origin) from error


def dump(value: Any) -> str:
    """Write plain values as block-style YAML, keys in their order. `parse` reads equal values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
