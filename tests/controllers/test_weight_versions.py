from __future__ import annotations

import pytest

from controllers.errors import VersionRegression
from controllers.weight_versions import MemoryLedgerStore, VersionLedger
from tests.controllers.harness import version


def test_reserved_numbers_rise_and_a_skipped_one_is_never_given_again() -> None:
    ledger = VersionLedger(MemoryLedgerStore())
    first, second = ledger.reserve(), ledger.reserve()
    ledger.commit(version(second))
    assert (first, second, ledger.reserve()) == (1, 2, 3)
    assert ledger.latest == version(2)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_version_that_does_not_rise_is_refused(number: int) -> None:
    ledger = VersionLedger(MemoryLedgerStore())
    ledger.commit(version(3))
    with pytest.raises(VersionRegression):
        ledger.commit(version(number))
    assert ledger.latest == version(3)


def test_numbers_go_on_over_a_resume() -> None:
    """O24: version 57 was published; after a restart the next one is above 57, never 1."""
    store = MemoryLedgerStore()
    before = VersionLedger(store)
    for _ in range(57):
        number = before.reserve()
    before.commit(version(number))

    after = VersionLedger(store)
    assert after.latest == version(57)
    assert after.reserve() == 58
    with pytest.raises(VersionRegression):
        after.commit(version(50))


def test_a_store_that_forgot_its_reservations_is_caught() -> None:
    class Forgetful(MemoryLedgerStore):
        def reserve(self) -> int:
            return 1

    store = Forgetful()
    store.commit(version(57))
    with pytest.raises(VersionRegression):
        VersionLedger(store).reserve()


def test_only_published_versions_can_be_proven() -> None:
    ledger = VersionLedger(MemoryLedgerStore())
    with pytest.raises(VersionRegression, match="never published"):
        ledger.prove("e0-0001-ab12", version(1))
    ledger.commit(version(1))
    with pytest.raises(VersionRegression, match="never published"):
        ledger.prove("e0-0001-ab12", version(2))
    ledger.prove("e0-0001-ab12", version(1))
    assert ledger.proven("e0-0001-ab12") == version(1)
    assert ledger.proven("e0-0002-ab12") is None
    ledger.forget("e0-0001-ab12")
    assert ledger.proven("e0-0001-ab12") is None
