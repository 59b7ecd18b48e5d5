"""A checkpoint of ranks of any parallel sizes loads into any others: weights, moments, step and reference, exactly."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from miles.trainer.parallel import ONE_RANK, ParallelSizes, Place
from tests.miles.trainer.tiny import write_model
from tests.support.ranks import Ranks, ranks

pytestmark = pytest.mark.real

TP2, PP2, DP2 = ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(data=2)
SP2, EP2 = ParallelSizes(tensor=2, sequence=True), ParallelSizes(data=2, expert=2)
STEP, COUNTERS = 13.0, (5, 2, 1)


class State:
    """A model and an optimizer of one rank, and the four sets of tensors that a checkpoint holds of them."""

    def __init__(self, folder: Path, sizes: ParallelSizes) -> None:
        from miles.trainer import gradients
        from miles.trainer.architecture import read_architecture
        from miles.trainer.model import build_model
        from miles.trainer.optimizer import PortableFP32Optimizer
        from miles.trainer.options import TrainerOptions
        from miles.trainer.reference_model import ReferenceModel

        self.arch = read_architecture(folder)
        self.place = Place.of(torch.distributed.get_rank(), sizes)
        self.model = build_model(self.arch, self.place)
        gradients.with_gradient_buffers(self.model)
        self.optimizer = PortableFP32Optimizer(self.model, TrainerOptions(folder, parallel=sizes))
        self.reference = ReferenceModel(self.model).weights
        named = dict(self.model.named_parameters())
        self.moments: dict[str, Any] = {name: self.optimizer.optimizer.state[one] for name, one in named.items()}
        self.named = named

    def sets(self) -> dict[str, dict[str, torch.Tensor]]:
        """Live tensors, by set and parameter name."""
        result: dict[str, dict[str, torch.Tensor]] = {
            "weights": {name: parameter.detach() for name, parameter in self.named.items()},
            "reference": self.reference,
        }
        for kind in ("exp_avg", "exp_avg_sq"):
            result[kind] = {name: self.optimizer.optimizer.state[one][kind] for name, one in self.named.items()}
        return result

    def wanted(self, tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        """What this rank has to hold of a set, padding included."""
        from miles.trainer.layout import global_shapes
        from tests.miles.trainer.whole_tensors import copy_in

        dice = torch.Generator().manual_seed(len(kind))
        whole = {name: torch.randn(shape, generator=dice) for name, shape in global_shapes(self.arch).items()}
        result = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        copy_in(result, whole, self.arch, self.place)
        return result


def write(folder: Path, checkpoint: Path, sizes: ParallelSizes) -> None:
    """Fill a rank's state from the sets and save it."""
    from miles.trainer.checkpoint import Counters, state_to_save
    from miles.trainer.checkpoint_writer import CheckpointWriter

    state = State(folder, sizes)
    for kind, tensors in state.sets().items():
        for name, content in state.wanted(tensors, kind).items():
            tensors[name].copy_(content)
    for parameter in state.named.values():
        state.optimizer.optimizer.state[parameter]["step"].fill_(STEP)
    seed_rank()
    writer = CheckpointWriter(30.0)
    writer.begin(checkpoint, state_to_save(state.model, state.optimizer, Counters(*COUNTERS), state.reference))
    writer.wait()


def seed_rank() -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)


def drawn() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


def read(folder: Path, checkpoint: Path, sizes: ParallelSizes, swapped: bool = False) -> dict[str, Any]:
    """Load into a rank whose state is junk; whether each set is what this rank has to hold, and the rest.

    `swapped` compares with other sets: a comparison that cannot fail shows itself.
    """
    from miles.trainer import checkpoint as checkpoints

    state = State(folder, sizes)
    for tensors in state.sets().values():
        for tensor in tensors.values():
            tensor.fill_(7.0)
    counters = checkpoints.load(checkpoint, state.model, state.optimizer, state.reference)
    result: dict[str, Any] = {"counters": counters, "drawn": drawn()}
    for kind, tensors in state.sets().items():
        wanted = state.wanted(tensors, kind + "x" if swapped else kind)
        result[kind] = all(torch.equal(tensors[name], wanted[name]) for name in tensors) and len(tensors) > 0
    result["steps"] = {float(state.optimizer.optimizer.state[one]["step"]) for one in state.named.values()}
    return result


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with ranks(1) as group:
        yield group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_model(folder / "tied", "qwen3", tied=True),
        "untied": write_model(folder / "untied", "qwen2", tied=False),
        "experts": write_model(folder / "experts", "qwen3_moe", tied=False),
    }


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [
        ("tied", TP2, ONE_RANK),
        ("tied", ONE_RANK, TP2),
        ("tied", PP2, ONE_RANK),
        ("tied", ONE_RANK, PP2),
        ("tied", TP2, PP2),
        ("tied", PP2, SP2),
        ("tied", DP2, ONE_RANK),
        ("tied", ONE_RANK, DP2),
        ("untied", TP2, ONE_RANK),
        ("untied", PP2, TP2),
        ("untied", ONE_RANK, PP2),
        ("experts", EP2, ONE_RANK),
        ("experts", ONE_RANK, EP2),
        ("experts", EP2, SP2),
        ("experts", SP2, DP2),
        ("experts", PP2, EP2),
    ],
    ids=lambda value: value if isinstance(value, str) else shown(value),
)
def test_every_set_is_exact_in_other_sizes(
    kind: str,
    saved: ParallelSizes,
    loaded: ParallelSizes,
    pair: Ranks,
    alone: Ranks,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    writers, readers = (pair if sizes.world_size == 2 else alone for sizes in (saved, loaded))
    writers.run_as(saved, write, folders[kind], tmp_path / "checkpoint", saved)
    for found in readers.run_as(loaded, read, folders[kind], tmp_path / "checkpoint", loaded):
        assert found["weights"] and found["exp_avg"] and found["exp_avg_sq"] and found["reference"]
        assert found["steps"] == {STEP}
        assert (found["counters"].steps, found["counters"].warmup_steps, found["counters"].skipped_steps) == COUNTERS
    controls = readers.run_as(loaded, read, folders[kind], tmp_path / "checkpoint", loaded, True)
    assert not any(found[name] for found in controls for name in ("weights", "exp_avg", "exp_avg_sq", "reference"))


def shown(sizes: ParallelSizes) -> str:
    names = {ONE_RANK: "one", TP2: "tp2", PP2: "pp2", DP2: "dp2", SP2: "sp2", EP2: "ep2"}
    return names[sizes]


def test_each_rank_goes_on_with_its_own_random_numbers(pair: Ranks, folders: dict[str, Path], tmp_path: Path) -> None:
    """Fails when a rank takes the generators of another: data-parallel ranks would draw the same numbers."""
    pair.run_as(DP2, write, folders["tied"], tmp_path / "checkpoint", DP2)
    expected = pair.run(drawn)
    found = [one["drawn"] for one in pair.run_as(DP2, read, folders["tied"], tmp_path / "checkpoint", DP2)]
    assert found == expected and found[0] != found[1]


def test_in_other_sizes_all_go_on_with_those_of_rank_0(
    pair: Ranks, alone: Ranks, folders: dict[str, Path], tmp_path: Path
) -> None:
    pair.run_as(TP2, write, folders["tied"], tmp_path / "checkpoint", TP2)
    expected = pair.run(drawn)[0]
    for group, sizes in ((alone, ONE_RANK), (pair, DP2)):
        for found in group.run_as(sizes, read, folders["tied"], tmp_path / "checkpoint", sizes):
            assert found["drawn"] == expected


def test_a_rank_that_cannot_write_fails_the_checkpoint_on_all(
    pair: Ranks, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Fails when only the rank's own error counts: rank 0 would put an incomplete folder in its place."""
    told = pair.run_as(TP2, write_failing, folders["tied"], tmp_path / "checkpoint", TP2)
    assert all("rank 1: OSError: no space left" in error for error in told)
    assert list(tmp_path.iterdir()) == []


def write_failing(folder: Path, checkpoint: Path, sizes: ParallelSizes) -> str:
    """Save with a full disk on rank 1; the error."""
    from controllers.errors import CheckpointFailed
    from miles.trainer import checkpoint_writer

    def full(_plan: Any) -> Any:
        raise OSError("no space left")

    on_rank_1 = torch.distributed.get_rank() == 1
    with mock.patch.object(checkpoint_writer._Plan, "write", full) if on_rank_1 else contextlib.nullcontext():
        try:
            write(folder, checkpoint, sizes)
        except CheckpointFailed as error:
            return str(error)
    return "no error"
