"""Two GPUs over NCCL train as one does: data, tensor and sequence, pipeline and context parallel."""

from __future__ import annotations

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


def train(folder: Path, dtype: str, sizes: ParallelSizes) -> dict[str, Any]:
    one = learner(folder, device="cuda", dtype=dtype, micro_batch_tokens=100, parallel=sizes)
    metrics = [one.warmup_step(examples(step), LR).metrics for step in range(STEPS)]
    tensors = {name: tensor.cpu() for name, tensor in hf_tensors(one).items()}
    return {"losses": [m["loss"] for m in metrics], "norms": [m["grad_norm"] for m in metrics], "tensors": tensors}


def train_as_rank(rank: int, folder: Path, dtype: str, sizes: ParallelSizes, rendezvous: str, out: Path) -> None:
    """In a process of its own."""
    from miles.trainer.cpu_compat import import_megatron
    from miles.trainer.process_group import connect_rendezvous, join, leave

    import_megatron()
    join(rank, sizes, connect_rendezvous(rendezvous, 60.0), rendezvous, device="cuda", gpu=rank)
    result = train(folder, dtype, sizes)
    if rank == 0:
        torch.save(result, out)
    leave()


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("kind", SIZES)
def test_two_gpus_train_as_one(tmp_path: Path, kind: str) -> None:
    from miles.trainer.process_group import host_rendezvous

    folder = write_model(tmp_path / "model", "qwen3_moe" if kind == "expert" else "qwen3")
    for dtype, tolerance in (("float32", 3e-5), ("bfloat16", 0.03)):
        store, rendezvous = host_rendezvous(60.0, "127.0.0.1")
        out = tmp_path / f"{dtype}.pt"
        arguments = (folder, dtype, SIZES[kind], rendezvous, out)
        torch.multiprocessing.spawn(train_as_rank, arguments, nprocs=2)  # type: ignore[no-untyped-call]
        del store
        found = torch.load(out)
        expected = train(folder, dtype, ParallelSizes())
        assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
        assert found["norms"] == pytest.approx(expected["norms"], rel=max(1e-4, tolerance))
        assert found["tensors"].keys() == expected["tensors"].keys()
        if dtype == "float32":
            for name, tensor in expected["tensors"].items():
                torch.testing.assert_close(found["tensors"][name], tensor, rtol=0, atol=tolerance)
