"""docs/configuration.md says what the models say."""

from __future__ import annotations

from pathlib import Path

from miles.config.reference import reference


def test_the_committed_page_is_up_to_date() -> None:
    """When this fails: python -m miles.config.reference > docs/configuration.md."""
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text() == reference()
