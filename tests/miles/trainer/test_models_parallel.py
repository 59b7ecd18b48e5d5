"""Two ranks read a Hugging Face folder box by box and write it back whole, whatever they share the model by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from controllers.errors import ConfigError
from miles.trainer import weights
from miles.trainer.architecture import read_architecture
from miles.trainer.model import build_model
from miles.trainer.parallel import ParallelSizes, Place
from tests.miles.trainer.tiny import write_model
from tests.support.ranks import Ranks

pytestmark = pytest.mark.real


def load_and_export(sizes: ParallelSizes, source: Path, target: Path) -> str:
    """What a rank does; the error that it met."""
    place = Place.of(torch.distributed.get_rank(), sizes)
    arch = read_architecture(source)
    parameters = dict(build_model(arch, place).named_parameters())
    weights.load_hf(parameters, source, arch, place)
    try:
        weights.export_hf(parameters, arch, source, target, place)
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("kind", "tied", "sizes"),
    [
        ("qwen2", False, ParallelSizes(tensor=2)),
        ("gemma", True, ParallelSizes(pipeline=2)),
        ("qwen3_moe", False, ParallelSizes(pipeline=2)),
        ("qwen3_moe", False, ParallelSizes(tensor=2, sequence=True)),
        ("qwen3_moe", True, ParallelSizes(data=2, expert=2)),
        ("qwen3", True, ParallelSizes(data=2)),
    ],
)
def test_what_two_ranks_load_and_export_is_the_same_folder(
    pair: Ranks, tmp_path: Path, kind: str, tied: bool, sizes: ParallelSizes
) -> None:
    source = write_model(tmp_path / "model", kind, tied=tied)
    assert pair.run_as(sizes, load_and_export, sizes, source, tmp_path / "out") == ["", ""]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_that_rank_0_refuses_leaves_no_rank_waiting(pair: Ranks, tmp_path: Path) -> None:
    """Fails, by its deadline, where rank 0 does not take what the others send after an error of its own."""
    sizes = ParallelSizes(pipeline=2)
    source = write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("only copy")
    first, other = pair.run_as(sizes, load_and_export, sizes, source, tmp_path / "out")
    assert "not empty" in first and not other
    assert pair.run_as(sizes, load_and_export, sizes, source, tmp_path / "new") == ["", ""]
