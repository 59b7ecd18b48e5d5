"""Tests that need a CUDA GPU; without one each is skipped and says so. One NCCL group of one for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from miles.trainer.cpu_compat import import_megatron

if torch.cuda.is_available():
    import_megatron()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip without a GPU; on one, libraries warn about themselves, which is not under test here."""
    without = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(without)
            item.add_marker(pytest.mark.filterwarnings("ignore::Warning"))
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """torch compiles a function for a few kinds of arguments only; a test has its own."""
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """A process group of one with Megatron's parallel state."""
    from miles.trainer.process_group import join_alone
    from tests.support.rank_imports import leave

    join_alone(device="cuda")
    yield
    leave()
