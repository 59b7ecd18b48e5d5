"""Megatron is imported once, quietly, before any module of this package; one gloo group of one for the session."""

from collections.abc import Iterator

import pytest

from miles.trainer.cpu_compat import import_megatron
from tests.support.ranks import Ranks, ranks

import_megatron()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Megatron warns about itself on every call; pytest resets the filter that import_megatron installs."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            for module in ("megatron", "torch.distributed"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::Warning:{module}"))


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """A process group of one with Megatron's parallel state."""
    from miles.trainer.process_group import join_alone
    from tests.support.rank_imports import leave

    join_alone(threads=1)
    yield
    leave()


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes joined by gloo."""
    with ranks(2) as group:
        yield group


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Model folders and plain runs: `tests.miles.trainer.parallel_checks.Models`."""
    from tests.miles.trainer.parallel_checks import Models

    return Models(tmp_path_factory.mktemp("models"))
