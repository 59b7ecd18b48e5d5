from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.embedded_server import RunningServer, embedded_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One engine for all contract tests that leave it as they found it."""
    with embedded_server(tmp_path_factory.mktemp("model")) as running:
        yield running
