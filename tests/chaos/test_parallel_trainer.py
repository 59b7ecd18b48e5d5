"""Whole runs with a trainer of two ranks: engines get the weights of both, by RDMA reads, while they generate."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles
from tests.chaos.small_run import (
    QUICKSTART,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    read_events,
    read_metrics,
    read_summary,
    small,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sizes", [{"data_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}], ids=str)
async def test_engines_sample_from_what_two_ranks_train(tmp_path: Path, sizes: dict[str, int]) -> None:
    """With staleness 0 each batch is sampled by the newest weights, so both sides' logprobs agree.

    Fails when the share of rank 1 (under tensor parallelism) is not what engines install: every step moves all of it.
    """
    folder = tmp_path / "run"
    overrides = small(
        folder,
        train__steps=3,
        eval__every=0,
        engines__count=1,
        rollout__max_staleness=0,
        trainer__optimizer__lr=0.01,
        reward="tests.chaos.small_run:even_codes",
        **{f"trainer__{name}": size for name, size in sizes.items()},
    )
    async with miles.open_run(QUICKSTART, overrides) as run:
        async for batch in run.batches():
            samples = [one for group in batch.groups for one in group.trajectories]
            found = await run.trainer.logprobs([(one.prompt_ids, one.response_ids) for one in samples])
            for one, values in zip(samples, found, strict=True):
                assert values == pytest.approx(one.logprobs, abs=1e-3)
            await run.trainer.step(batch)
            await run.publish_weights()
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["logprob_diff_max"] < 1e-3 for line in metrics)
    summary = read_summary(folder)
    assert summary["status"] == "finished" and summary["weight_version"] == 4
    assert_account_adds_up(summary)
    assert_served_only_what_was_proven(read_events(folder))
