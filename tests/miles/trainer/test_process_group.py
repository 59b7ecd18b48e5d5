"""Ranks meet: who is missing is named, a dead peer is noticed, Megatron's places are ours."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from controllers.errors import WaitTimeout
from miles.trainer import process_group
from miles.trainer.parallel import ParallelSizes, Place
from tests.support.ranks import RankFailed, Ranks, ranks

THREE = ParallelSizes(data=3)


def test_a_rank_that_does_not_come_is_named() -> None:
    store, rendezvous = process_group.host_rendezvous(5.0, "127.0.0.1")
    store.set("rank 1", "here")
    with pytest.raises(WaitTimeout, match=r"rank 2 of 3 did not come within 0\.2 s") as caught:
        process_group.join(0, THREE, store, rendezvous, join_timeout_s=0.2, call_timeout_s=5.0)
    assert caught.value.waited_for == "rank 2"


def test_a_meeting_point_that_is_not_there_is_named() -> None:
    with pytest.raises(WaitTimeout, match=r"no trainer rank 0 at 127\.0\.0\.1:1 within 0\.2 s"):
        process_group.connect_rendezvous("127.0.0.1:1", 0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", None])
def test_the_meeting_point_listens_at_the_address_it_names_and_nowhere_else(host: str | None) -> None:
    """Fails when the store opens its own socket, which takes connections from every network."""
    store, rendezvous = process_group.host_rendezvous(5.0, host)
    port = int(rendezvous.rpartition(":")[2])
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    assert [f"{address.ip}:{address.port}" for address in listening if address.port == port] == [rendezvous]
    other = process_group.connect_rendezvous(rendezvous, 5.0)
    other.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.usefixtures("megatron")
def test_joining_alone_twice_is_harmless() -> None:
    assert process_group.join_alone() == Place()


def place_for(sizes: ParallelSizes) -> Place:
    return process_group.divide(sizes, 60.0)


@pytest.mark.real
def test_every_rank_has_the_place_that_the_layout_gives_it(pair: Ranks) -> None:
    for sizes in (ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(data=2, expert=2)):
        assert pair.run_as(sizes, place_for, sizes) == [Place.of(0, sizes), Place.of(1, sizes)]


@pytest.mark.real
def test_ranks_that_megatron_placed_elsewhere_are_refused(pair: Ranks) -> None:
    """Fails without the comparison in process_group.divide."""
    with pytest.raises(RankFailed, match="Megatron places rank"):
        pair.run_as(ParallelSizes(data=2), place_for, ParallelSizes(tensor=2))


def die_or_tell(folder: Path) -> None:
    """Rank 1 is killed in a collective; rank 0 writes how long it took to hear of it."""
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        torch.distributed.all_reduce(torch.ones(1))
    except RuntimeError:
        (folder / "noticed").write_text(str(time.monotonic() - started))
        raise


@pytest.mark.real
def test_a_dead_peer_is_noticed_at_once(tmp_path: Path) -> None:
    with ranks(2) as group, pytest.raises(RankFailed):
        try:
            group.run(die_or_tell, tmp_path)
        finally:
            assert float((tmp_path / "noticed").read_text()) < 5.0
