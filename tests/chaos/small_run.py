"""A run small enough for a test: the quickstart's file with a few overrides, everything else real."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"


def small(folder: Path, **extra: Any) -> dict[str, Any]:
    """Overrides for a short run of the quickstart into `folder`; `extra` names keys with `__` for dots."""
    return {
        "run.dir": str(folder),
        "train.steps": 6,
        "train.groups_per_step": 4,
        "train.warmup.steps": 3,
        "rollout.group_size": 4,
        "eval.prompts": 10,
        "inference.rolling_restart_at_step": None,
        "telemetry.progress": "off",
        "telemetry.plot": False,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }


def even_codes(prompt: str, response: str, label: str) -> float:
    """A reward that an untrained model earns too: the share of characters with an even code."""
    return sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))


def as_arguments(overrides: dict[str, Any]) -> list[str]:
    """The same as `key=value` words of a command line."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def read_summary(folder: Path) -> dict[str, Any]:
    """`summary.json`."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def read_events(folder: Path) -> list[dict[str, Any]]:
    """`events.jsonl`."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_account_adds_up(summary: dict[str, Any]) -> None:
    """Invariant 7: every dispatched group is in exactly one place."""
    groups = dict(summary["groups"])
    assert groups.pop("dispatched") == sum(groups.values())
    assert summary["lost"] == 0 and summary["duplicated"] == 0


def assert_served_only_what_was_proven(events: list[dict[str, Any]]) -> None:
    """Invariants 2 and 3: published numbers rise; Serving(v) only after this incarnation's proof of a published v."""
    published: list[int] = []
    proven: dict[str, set[int]] = defaultdict(set)
    served = 0
    for event in events:
        if event["event"] == "VersionPublished":
            assert not published or event["version"]["number"] > published[-1]
            published.append(event["version"]["number"])
        elif event["event"] == "VersionProven":
            assert event["version"]["number"] in published
            proven[event["incarnation"]].add(event["version"]["number"])
        elif event["event"] == "EngineStateChanged" and event["state"] == "Serving":
            assert event["version"] in proven[event["incarnation"]], event
            served += 1
    assert served, "no engine ever served"


def least_available(events: list[dict[str, Any]]) -> int:
    """The fewest engines in Serving or Updating at any moment from the first full fleet to the first Stopped."""
    states: dict[str, str] = {}
    fewest, full = None, False
    for event in events:
        if event["event"] != "EngineStateChanged":
            continue
        if event["state"] == "Stopped" and event["reason"] == "the controller closed":
            break
        states[event["engine"]] = event["state"]
        available = sum(state in ("Serving", "Updating") for state in states.values())
        full = full or (available == len(states) and len(states) > 1)
        if full:
            fewest = available if fewest is None else min(fewest, available)
    assert fewest is not None, "the fleet was never whole"
    return fewest
