"""Sinks of the controller's event bus that translate weight versions into optimizer steps, for the executor."""

from __future__ import annotations

from controllers.engine_state import Serving, Updating
from controllers.errors import VersionRegression
from controllers.events import EngineStateChanged, Event, VersionPublished
from controllers.inference_controller import InferenceController
from executors.rollout_executor import RolloutExecutor

AVAILABLE_STATES = (Serving.__name__, Updating.__name__)


class VersionSteps:
    """Which optimizer step the weights of each published version are from. A sink of the controller's event bus."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def __call__(self, version: int) -> int:
        """Raises VersionRegression for a version that was never published: no token may be newer than that."""
        if version not in self._steps:
            raise VersionRegression(f"tokens of version {version}, which was never published", number=version)
        return self._steps[version]

    def on_event(self, now: float, event: Event) -> None:
        """Take over a publication."""
        if isinstance(event, VersionPublished):
            self._steps[event.version.number] = event.version.step


class ServedSteps:
    """Tells the executor when the weights of a step are in service. A sink of the controller's event bus.

    That is once no available engine serves older ones: were groups admitted at the publication, some would land on
    engines about to be updated, and would be too old by the time they are trained. An engine that lags is waited for
    no longer than until the next publication.
    """

    def __init__(self, controller: InferenceController, version_steps: VersionSteps, executor: RolloutExecutor) -> None:
        self._controller = controller
        self._version_steps = version_steps
        self._executor = executor
        self._told = -1

    def on_event(self, now: float, event: Event) -> None:
        """Take over a change in what engines serve, or a publication."""
        if not isinstance(event, EngineStateChanged | VersionPublished):
            return
        served = [
            self._version_steps(engine.version)
            for engine in self._controller.snapshot()
            if engine.state in AVAILABLE_STATES and engine.version is not None
        ]
        step = -1 if not served else max(served) if isinstance(event, VersionPublished) else min(served)
        if step > self._told:
            self._told = step
            self._executor.on_published(step)
