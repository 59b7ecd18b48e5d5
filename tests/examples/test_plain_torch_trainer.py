"""The example of a trainer of one's own, in a real run: engines get its weights, and it keeps its promises."""

from __future__ import annotations

from pathlib import Path

import pytest

import miles
from miles.batch_log import logged_steps
from miles.models.folder import inspect_model_folder
from tests.chaos.small_run import (
    REPOSITORY,
    assert_account_adds_up,
    assert_served_only_what_was_proven,
    read_events,
    read_metrics,
    read_summary,
    small,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

MORE = {"trainer__optimizer__lr": 0.01, "debug__dump_batches": True}
CONFIG = REPOSITORY / "examples" / "plain_torch_trainer.yaml"


async def test_it_trains_and_engines_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With staleness 0 each batch is sampled by the weights of the step before: both sides' logprobs agree.

    Fails when what `PlainRank.shards` shows is not what is trained, by the second batch at the latest.
    """
    monkeypatch.chdir(REPOSITORY)
    overrides = small(tmp_path / "run", train__steps=3, rollout__max_staleness=0, **MORE)
    async with miles.open_run(CONFIG, overrides) as run:
        begun = (await run.trainer.logprobs([((5, 6), (7, 8))]))[0]
        async for batch in run.batches():
            samples = [one for group in batch.groups for one in group.trajectories]
            found = await run.trainer.logprobs([(one.prompt_ids, one.response_ids) for one in samples])
            for one, values in zip(samples, found, strict=True):
                assert values == pytest.approx(one.logprobs, abs=1e-3)
            await run.trainer.step(batch)
            await run.publish_weights()
        trained = (await run.trainer.logprobs([((5, 6), (7, 8))]))[0]
        assert run.trainer.steps_done == 3 and trained != pytest.approx(begun, abs=1e-3)
        await run.trainer.export(tmp_path / "model")
        await run.trainer.load(run.folder / "checkpoints" / "step-000000")
        assert run.trainer.steps_done == 0
        assert (await run.trainer.logprobs([((5, 6), (7, 8))]))[0] == pytest.approx(begun, abs=1e-6)
    assert inspect_model_folder(tmp_path / "model").architecture == "Qwen3ForCausalLM"
    summary = read_summary(tmp_path / "run")
    assert summary["status"] == "finished" and summary["steps"] == 3 and summary["weight_version"] == 4
    assert_account_adds_up(summary)
    assert_served_only_what_was_proven(read_events(tmp_path / "run"))
    assert logged_steps(tmp_path / "run" / "batches") == [1, 2, 3]
    assert {"reward", "loss", "grad_norm", "lr"} <= read_metrics(tmp_path / "run")[0].keys()
