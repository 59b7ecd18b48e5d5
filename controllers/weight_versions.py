"""Weight versions and the ledger: what is published is kept apart from what each engine has proven to serve.

Numbers strictly increase for the life of a run, across resumes: a number is reserved durably before a byte is
staged under it. Called by the weight sync service (reserve, commit) and the controller (proven).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from controllers.errors import VersionRegression


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One published set of weights.

    `number` rises strictly over the life of a run; `step` is the optimizer step whose weights these are;
    `lineage` changes when a resume goes back behind trained steps; `digest` is the layout-independent sum over
    all global tensors, as 16 hex digits.
    """

    number: int
    step: int
    lineage: int
    digest: str


class LedgerStore(Protocol):
    """The durable side of the ledger. The assembly binds it to the run's journal."""

    def reserve(self) -> int:
        """Reserve the next version number durably and return it. Never returns a number twice."""

    def commit(self, version: WeightVersion) -> None:
        """Record a published version durably."""

    def latest(self) -> WeightVersion | None:
        """The newest committed version, or None before the first."""


class MemoryLedgerStore:
    """A LedgerStore for a controller that is used without a run folder, and for tests."""

    def __init__(self) -> None:
        self._reserved = 0
        self._latest: WeightVersion | None = None

    def reserve(self) -> int:
        self._reserved += 1
        return self._reserved

    def commit(self, version: WeightVersion) -> None:
        self._latest = version

    def latest(self) -> WeightVersion | None:
        return self._latest


class VersionLedger:
    """The newest published version, and per engine incarnation the version proven to be serving."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._latest = store.latest()
        self._committed = False
        self._proven: dict[str, WeightVersion] = {}

    @property
    def has_commit(self) -> bool:
        """Whether a version was committed through this ledger: one of before a resume cannot be synced any more."""
        return self._committed

    @property
    def latest(self) -> WeightVersion | None:
        """The newest published version, or None before the first."""
        return self._latest

    def reserve(self) -> int:
        """Reserve the next version number durably. A number that is never committed is simply skipped."""
        number = self._store.reserve()
        if self._latest is not None and number <= self._latest.number:
            raise VersionRegression(
                f"reserved version {number} is not above published {self._latest.number}", number=number
            )
        return number

    def commit(self, version: WeightVersion) -> None:
        """Publish `version`. Raises VersionRegression unless its number is above every one before."""
        if self._latest is not None and version.number <= self._latest.number:
            raise VersionRegression(
                f"version {version.number} is not above published {self._latest.number}", number=version.number
            )
        self._store.commit(version)
        self._latest = version
        self._committed = True

    def prove(self, incarnation: str, version: WeightVersion) -> None:
        """Record that every rank of this incarnation itself proved `version`."""
        if self._latest is None or version.number > self._latest.number:
            raise VersionRegression(f"version {version.number} was never published", number=version.number)
        self._proven[incarnation] = version

    def proven(self, incarnation: str) -> WeightVersion | None:
        """The version this incarnation has proven, or None."""
        return self._proven.get(incarnation)

    def forget(self, incarnation: str) -> None:
        """Drop a dead incarnation."""
        self._proven.pop(incarnation, None)
