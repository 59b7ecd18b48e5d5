"""`trainer.backend`: what a factory is given, and what is refused in place of a trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from miles.trainer.options import TrainerOptions
from miles.trainer.registry import check_backend, load_backend, open_trainer

HERE = "tests.miles.trainer.test_registry"
OPTIONS = TrainerOptions(Path("model"), lr=0.5)


@asynccontextmanager
async def factory(options: TrainerOptions, folder: Path, *, colour: str = "none") -> AsyncIterator[Any]:
    yield (options.lr, folder, colour)


def no_manager(options: TrainerOptions, folder: Path) -> str:
    return "a trainer, as it were"


async def test_a_factory_gets_options_folder_and_its_own_options(tmp_path: Path) -> None:
    async with open_trainer(f"{HERE}:factory", OPTIONS, tmp_path, {"colour": "blue"}) as made:
        given: object = made
    assert given == (0.5, tmp_path, "blue")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("nopkg.mod:make", "cannot import 'nopkg.mod'"),
        (f"{HERE}:HERE", "neither a function nor a class"),
        (f"{HERE}:no_manager", "no async context manager"),
        ("os:getcwd", r"cannot be called with \(options, folder\): too many positional arguments"),
    ],
)
def test_what_is_no_factory_is_refused_by_key_and_name(name: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        open_trainer(name, OPTIONS, tmp_path, {})
    assert "trainer.backend" in str(caught.value) and repr(name) in str(caught.value)


def test_options_that_a_factory_does_not_take_are_refused_by_their_key(tmp_path: Path) -> None:
    """Fails when the factory is called without a look at its signature: a TypeError, once Ray and engines are up."""
    load_backend(f"{HERE}:factory", {"colour": "red"})
    with pytest.raises(ConfigError, match=r"trainer\.backend_options: .*:factory' does not take \{'color': 'red'\}: "):
        load_backend(f"{HERE}:factory", {"color": "red"})


def test_a_check_imports_nothing() -> None:
    check_backend("megatron")
    check_backend("nopkg.mod:make")
    with pytest.raises(ConfigError, match="did you mean 'megatron'"):
        check_backend("megatrn")
    with pytest.raises(ConfigError):
        load_backend("nopkg.mod:make", {})
