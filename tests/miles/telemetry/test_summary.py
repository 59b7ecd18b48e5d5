"""`summary.json`, key by key."""

from __future__ import annotations

import json
from pathlib import Path

from controllers.events import EngineRestarted, TrainerLost, TrainerRebuilt, VersionPublished
from controllers.weight_versions import WeightVersion
from miles.telemetry.summary import SummaryBuilder, describe


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Clock) -> SummaryBuilder:
    builder = SummaryBuilder(clock)
    builder.add_event(VersionPublished(WeightVersion(1, 0, 0, "aa")))
    for step in range(1, 21):
        builder.add_step(step, reward=step / 20, staleness=step % 3)
        builder.add_event(VersionPublished(WeightVersion(step + 1, step, 0, "aa")))
    builder.add_event(EngineRestarted("engine-0", "a", planned=True, restarts=1))
    builder.add_event(EngineRestarted("engine-0", "b", planned=False, restarts=2))
    builder.add_event(TrainerLost(1, 3, "killed"))
    builder.add_event(TrainerRebuilt(2, 3, 3, 12.0))
    builder.add_eval(0.2)
    builder.add_eval(0.9)
    builder.set_tokens_generated(1234)
    counts = {"dispatched": 8, "trained": 4, "filtered": 1, "dropped": 1, "failed": 1, "buffered": 1, "in_flight": 0}
    reasons = {"filtered": {"zero_variance": 1}, "dropped": {"prompt_too_long": 1}, "failed": {}}
    builder.set_groups(counts, reasons, lost=0, duplicated=0)
    return builder


def test_it_holds_what_the_design_says() -> None:
    clock = Clock()
    builder = filled(clock)
    clock.now = 112.5
    assert builder.build("finished") == {
        "status": "finished",
        "steps": 20,
        "wall_s": 12.5,
        "tokens_generated": 1234,
        "reward": {"first": 0.075, "last": 0.975},
        "eval": {"first": 0.2, "last": 0.9},
        "weight_version": 21,
        "weight_syncs": 21,
        "engine_restarts": 2,
        "trainer_restarts": 1,
        "staleness_max": 2,
        "groups": {
            "dispatched": 8, "trained": 4, "filtered": 1, "dropped": 1, "failed": 1, "buffered": 1, "in_flight": 0,
        },
        "group_reasons": {"filtered": {"zero_variance": 1}, "dropped": {"prompt_too_long": 1}},
        "lost": 0,
        "duplicated": 0,
    }  # fmt: skip


def test_a_tenth_is_at_least_one_step_and_unscored_steps_do_not_count() -> None:
    builder = SummaryBuilder(Clock())
    builder.add_step(1, reward=0.25, staleness=0)
    builder.add_step(2, reward=None, staleness=0)
    builder.add_step(3, reward=0.75, staleness=0)
    summary = builder.build("finished")
    assert summary["reward"] == {"first": 0.25, "last": 0.75}
    assert summary["steps"] == 3


def test_a_run_that_did_nothing_still_has_every_key(tmp_path: Path) -> None:
    clock = Clock()
    empty = SummaryBuilder(clock).write(tmp_path / "summary.json", "failed", error="no engine came up")
    assert set(empty) == {*filled(clock).build("finished"), "error"}
    assert empty["reward"] == {"first": None, "last": None}
    assert empty["error"] == "no engine came up"
    assert json.loads((tmp_path / "summary.json").read_text()) == empty
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_the_description_names_what_a_person_asks_for() -> None:
    clock = Clock()
    builder = filled(clock)
    clock.now += 125
    text = describe(builder.build("failed", error="disk full"), Path("runs/x"))
    for part in ("failed after 20 steps in 2 min 5 s", "disk full", "0.075 -> 0.975", "0.200 -> 0.900",
                 "2 restarts", "4 trained of 8", "0 lost", "0 duplicated", "runs/x"):  # fmt: skip
        assert part in text
