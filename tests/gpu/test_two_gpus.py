"""Two GPUs over NCCL train as one does: data, tensor and sequence, pipeline, context and expert parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.trainer.parallel import ParallelSizes
from tests.gpu.test_learner import LR, STEPS, examples
from tests.miles.trainer.tiny import hf_tensors, learner, write_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

SIZES = {
    "data": ParallelSizes(data=2),
    "tensor": ParallelSizes(tensor=2, sequence=True),
    "pipeline": ParallelSizes(pipeline=2),
    "context": ParallelSizes(context=2),
    "expert": ParallelSizes(data=2, expert=2),
}
TOLERANCES = {"float32": 3e-5, "bfloat16": 0.03}
TIMEOUT_S = 200.0


def train(folder: Path, dtype: str, sizes: ParallelSizes) -> dict[str, Any]:
    one = learner(folder, device="cuda", dtype=dtype, micro_batch_tokens=100, parallel=sizes)
    metrics = [one.warmup_step(examples(step), LR).metrics for step in range(STEPS)]
    tensors = {name: tensor.cpu() for name, tensor in hf_tensors(one).items()}
    return {"losses": [m["loss"] for m in metrics], "norms": [m["grad_norm"] for m in metrics], "tensors": tensors}


def train_as_rank(rank: int, root: Path, rendezvous: dict[str, str]) -> None:
    """In a process of its own: every kind of parallelism in turn."""
    from miles.trainer.cpu_compat import import_megatron
    from miles.trainer.process_group import connect_rendezvous, join

    import_megatron()
    from tests.support.rank_imports import leave

    for kind, address in rendezvous.items():
        store, limits = connect_rendezvous(address, 60.0), {"join_timeout_s": 60.0, "call_timeout_s": 60.0}
        join(rank, SIZES[kind], store, address, device="cuda", **limits)
        for dtype in TOLERANCES:
            result = train(model_folder(root, kind), dtype, SIZES[kind])
            if rank == 0:
                torch.save(result, root / f"{kind}-{dtype}.pt")
        leave()


def model_folder(root: Path, kind: str) -> Path:
    return root / ("qwen3_moe" if kind == "expert" else "qwen3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the results of two ranks."""
    from miles.trainer.process_group import host_rendezvous

    root = tmp_path_factory.mktemp("two")
    for name in ("qwen3", "qwen3_moe"):
        write_model(root / name, name)
    hosted = {kind: host_rendezvous(60.0, "127.0.0.1") for kind in SIZES}
    addresses = {kind: address for kind, (_, address) in hosted.items()}
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(2):
            # A rank takes the first GPU that it sees.
            patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[rank])
            ranks.append(get_context("spawn").Process(target=train_as_rank, args=(rank, root, addresses)))
            ranks[-1].start()
            patch.undo()
    for process in ranks:
        process.join(TIMEOUT_S)
        process.kill()
    yield root


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", SIZES)
def test_two_gpus_train_as_one(trained: Path, kind: str, dtype: str) -> None:
    result = trained / f"{kind}-{dtype}.pt"
    assert result.is_file(), "the ranks ended before this"
    found, tolerance = torch.load(result), TOLERANCES[dtype]
    expected = train(model_folder(trained, kind), dtype, ParallelSizes())
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=max(1e-4, tolerance))
    assert found["tensors"].keys() == expected["tensors"].keys()
    if dtype == "float32":
        for name, tensor in expected["tensors"].items():
            torch.testing.assert_close(found["tensors"][name], tensor, rtol=0, atol=tolerance)
