from __future__ import annotations

import pickle

import pytest

from controllers.errors import EngineFailed, EngineRejected, InfrastructureError, MilesError


def test_ids_are_attributes_and_survive_pickling() -> None:
    error = EngineFailed("engine-0 is gone", engine="engine-0", incarnation="e0-0001-ab12", reason="killed")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is EngineFailed
    assert str(copy) == "engine-0 is gone"
    assert (copy.engine, copy.incarnation, copy.reason) == ("engine-0", "e0-0001-ab12", "killed")


def test_an_id_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="status"):
        _ = EngineRejected("no").status


def test_one_root() -> None:
    assert issubclass(EngineRejected, InfrastructureError)
    assert issubclass(InfrastructureError, MilesError)
