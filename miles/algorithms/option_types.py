"""Types of the options that functions of the registry take by keyword; `miles check` holds values against them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Bound = Annotated[float, Field(gt=0)]
"""A factor above 0."""

Margin = Annotated[float, Field(ge=0)]
"""A distance or a small constant, 0 or more."""

Clip = tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0)]]
"""How far a ratio may fall below and rise above 1."""

Level = Literal["token", "sequence"]
"""Whether a ratio is that of each token, or of the whole sequence (the product over its trained tokens)."""
