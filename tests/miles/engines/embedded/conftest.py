"""One tiny model folder for all tests here, and one engine process a module that wants one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.models.presets import write_preset
from tests.miles.engines.embedded.engine_process import EngineProcess


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the quickstart's model with random weights."""
    return write_preset("tiny-qwen3", tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[EngineProcess]:
    """A running engine with the test weight loader. Tests leave it resumed and without requests."""
    with EngineProcess(model_folder, "--custom-weight-loader", "tests.miles.engines.embedded.loaders.load") as engine:
        yield engine
