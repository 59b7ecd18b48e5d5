"""KV rows: memory that a mask hides must still be finite."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.engines.embedded.kv_cache import KvRows
from miles.engines.embedded.model_config import read_model_config


def test_new_memory_is_finite_also_after_growth(model_folder: Path) -> None:
    """Fails when `KvRows` takes memory as it comes (`torch.empty`): a weight of 0 times NaN is NaN.

    Deterministic mode fills what `torch.empty` gives with NaN, so that luck cannot hide it.
    """
    torch.use_deterministic_algorithms(True)
    try:
        rows = KvRows(read_model_config(model_folder), torch.float32, rows=4, capacity=8)
        rows.reserve(64)
        assert bool(rows.data.isfinite().all())
    finally:
        torch.use_deterministic_algorithms(False)
