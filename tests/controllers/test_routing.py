from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from controllers.routing import least_loaded, sticky


@dataclass(frozen=True)
class Slot:
    engine: str
    in_flight: int


def test_least_loaded_takes_the_fewest_in_flight_and_the_first_of_equals() -> None:
    assert least_loaded([Slot("a", 2), Slot("b", 1), Slot("c", 1)]).engine == "b"


def test_sticky_is_the_same_for_a_key_whatever_the_load_and_the_order() -> None:
    idle = [Slot("a", 0), Slot("b", 0), Slot("c", 0)]
    busy = [Slot("c", 9), Slot("a", 3), Slot("b", 0)]
    for key in map(str, range(100)):
        assert sticky(key, idle).engine == sticky(key, busy).engine


def test_sticky_spreads_keys_and_moves_only_those_of_an_engine_that_left() -> None:
    engines = [Slot(name, 0) for name in "abcd"]
    before = {key: sticky(key, engines).engine for key in map(str, range(400))}
    assert min(Counter(before.values()).values()) > 60
    after = {key: sticky(key, engines[:-1]).engine for key in before}
    assert all(after[key] == engine for key, engine in before.items() if engine != "d")
