"""docs/metrics.md as patterns, to hold the lines of a run against."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> dict[str, bool]:
    """Name (with `<k>` for any number) -> whether it is in every line."""
    names: dict[str, bool] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in names, f"{name} is described twice"
                names[name] = cells[2] == "always"
    return names


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of `names` that the page does not have."""
    patterns = [re.compile(re.escape(name).replace("<k>", r"\d+")) for name in documented()]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def always() -> set[str]:
    """Names that every line has."""
    return {name for name, in_every_line in documented().items() if in_every_line}
