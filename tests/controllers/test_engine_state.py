from __future__ import annotations

import pytest

from controllers.engine_state import (
    Draining,
    EngineState,
    Failed,
    Launching,
    Serving,
    Stopped,
    Syncing,
    Updating,
    is_available,
    transition,
)
from controllers.errors import IllegalTransition
from tests.controllers.harness import version

STATES: tuple[EngineState, ...] = (
    Launching(),
    Syncing(),
    Serving(version(1)),
    Updating(version(1), version(2)),
    Draining(10.0),
    Failed("it broke"),
    Stopped(),
)

LEGAL = {
    ("Launching", "Syncing"),
    ("Launching", "Failed"),
    ("Launching", "Stopped"),
    ("Syncing", "Serving"),
    ("Syncing", "Draining"),
    ("Syncing", "Failed"),
    ("Syncing", "Stopped"),
    ("Serving", "Updating"),
    ("Serving", "Draining"),
    ("Serving", "Failed"),
    ("Serving", "Stopped"),
    ("Updating", "Serving"),
    ("Updating", "Failed"),
    ("Updating", "Stopped"),
    ("Draining", "Stopped"),
    ("Draining", "Launching"),
    ("Draining", "Failed"),
    ("Failed", "Launching"),
    ("Failed", "Stopped"),
    ("Stopped", "Launching"),
}


@pytest.mark.parametrize("new", STATES, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize("old", STATES, ids=lambda state: type(state).__name__)
def test_every_pair(old: EngineState, new: EngineState) -> None:
    """All 49 pairs; guards the table `_LEGAL`."""
    if (type(old).__name__, type(new).__name__) in LEGAL:
        assert transition(old, new) is new
    else:
        with pytest.raises(IllegalTransition) as caught:
            transition(old, new)
        assert (caught.value.old, caught.value.new) == (old, new)


def test_only_serving_and_the_pause_of_an_update_are_available() -> None:
    assert [type(state).__name__ for state in STATES if is_available(state)] == ["Serving", "Updating"]
