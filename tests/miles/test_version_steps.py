"""The two sinks that know the steps of versions: whose step a version is, and when the executor hears it is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from controllers.errors import VersionRegression
from controllers.events import EngineStateChanged, VersionPublished
from controllers.fleet import EngineSnapshot
from controllers.inference_controller import InferenceController
from controllers.weight_versions import WeightVersion
from executors.rollout_executor import RolloutExecutor
from miles.version_steps import ServedSteps, VersionSteps


@dataclass
class Fleet:
    """As much of a controller and an executor as the sinks use."""

    serving: dict[str, tuple[str, int | None]]
    told: list[int] = field(default_factory=list)

    def snapshot(self) -> tuple[EngineSnapshot, ...]:
        return tuple(
            EngineSnapshot(
                engine=engine, incarnation=f"{engine}-1", state=state, version=version, pid=1, url="", in_flight=0,
                restarts=0, reason=None,
            )
            for engine, (state, version) in self.serving.items()
        )

    def on_published(self, step: int) -> None:
        self.told.append(step)


def _wire(fleet: Fleet) -> tuple[VersionSteps, ServedSteps]:
    steps = VersionSteps()
    return steps, ServedSteps(cast(InferenceController, fleet), steps, cast(RolloutExecutor, fleet))


def _published(number: int) -> VersionPublished:
    return VersionPublished(WeightVersion(number, number - 1, 1, "0"))


CHANGED = EngineStateChanged("engine-0", "engine-0-1", "Serving", "Updating")


def test_a_token_newer_than_what_is_published_is_an_error() -> None:
    """Invariant 3. Fails when an unknown version passes."""
    steps, _ = _wire(Fleet({}))
    steps.on_event(0.0, _published(1))
    assert steps(1) == 0
    with pytest.raises(VersionRegression, match="version 2"):
        steps(2)


def test_weights_are_in_service_once_no_engine_serves_older_ones() -> None:
    fleet = Fleet({"engine-0": ("Serving", 1), "engine-1": ("Serving", 1)})
    steps, served = _wire(fleet)
    for number in (1, 2):
        steps.on_event(0.0, _published(number))
    served.on_event(0.0, CHANGED)
    assert fleet.told == [0]
    fleet.serving["engine-0"] = ("Serving", 2)
    served.on_event(0.0, CHANGED)
    assert fleet.told == [0]
    fleet.serving["engine-1"] = ("Launching", None)
    served.on_event(0.0, CHANGED)
    assert fleet.told == [0, 1]


def test_a_lagging_engine_is_waited_for_until_the_next_publication_only() -> None:
    """Fails when one hanging engine can keep the whole fleet from new work."""
    fleet = Fleet({"engine-0": ("Serving", 2), "engine-1": ("Updating", 1)})
    steps, served = _wire(fleet)
    for number in (1, 2, 3):
        steps.on_event(0.0, _published(number))
    served.on_event(0.0, CHANGED)
    served.on_event(0.0, _published(3))
    assert fleet.told == [0, 1]
