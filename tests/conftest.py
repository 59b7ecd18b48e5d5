"""What all tests share: nothing that a test could not say itself, only guards against leaking between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    """Commands configure structlog for their process; the next test starts from its defaults."""
    yield
    structlog.reset_defaults()
