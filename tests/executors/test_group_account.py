"""One outcome for each group."""

from __future__ import annotations

import pytest

from executors.errors import RolloutError
from executors.group_account import GroupAccount, Outcome


def test_every_way_adds_up() -> None:
    account = GroupAccount()
    ends: list[Outcome] = ["filtered", "dropped", "failed"]
    for number in range(6):
        account.dispatch(f"g{number}")
        assert account.lost == 0
    for number, end in enumerate(ends):
        account.finish(f"g{number}", end, "why")
        assert account.lost == 0
    account.buffer("g3")
    account.buffer("g4")
    assert account.train("g3")
    assert account.lost == 0
    assert (account.dispatched, account.trained, account.buffered, account.in_flight) == (6, 1, 1, 1)
    assert account.reasons["dropped"] == {"why": 1}


def test_a_second_outcome_is_refused() -> None:
    account = GroupAccount()
    account.dispatch("g0")
    account.finish("g0", "dropped", "stale")
    with pytest.raises(RolloutError):
        account.finish("g0", "failed", "late")
    assert not account.train("g0")
    assert (account.dropped, account.failed, account.trained, account.duplicated) == (1, 0, 0, 1)


def test_a_group_is_dispatched_and_buffered_once() -> None:
    account = GroupAccount()
    account.dispatch("g0")
    with pytest.raises(RolloutError):
        account.dispatch("g0")
    account.buffer("g0")
    with pytest.raises(RolloutError):
        account.buffer("g0")
    assert account.lost == 0
