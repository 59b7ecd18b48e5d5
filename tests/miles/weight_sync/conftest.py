"""Options that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.weight_sync.options import WeightSyncOptions
from tests.miles.weight_sync.harness import quick


@pytest.fixture
def disk(tmp_path: Path) -> WeightSyncOptions:
    """The quickest transport to set up, for tests that are not about transports."""
    return quick(transport="disk", folder=tmp_path / "weights")
