"""A floor under the engine's speed. `python -m miles.bench.embedded_engine` gives the real figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.bench.embedded_engine import Load, measure, running_engine

pytestmark = pytest.mark.real


async def test_the_engine_stays_fast(model_folder: Path) -> None:
    """Tokens per second of the engine's own CPU time, so that a busy machine does not fail it.

    An idle core gives about four times the floor; a return to transformers' own generation would give a tenth of it.
    """
    with running_engine(model_folder, core=None) as (url, pid):
        await measure(url, pid, Load(requests=32, tokens=5, concurrency=32))
        measured = await measure(url, pid, Load(requests=48, tokens=100, concurrency=32))
    assert measured.tokens == 4800
    assert measured.tokens_per_cpu_s > 2000, measured
