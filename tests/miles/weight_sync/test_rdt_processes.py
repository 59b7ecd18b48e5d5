"""Real NIXL between real processes: torn reads, a killed source, a source that stops in mid-read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest

from controllers.errors import PublishFailed
from controllers.events import EngineStateChanged
from miles.weight_sync.messages import Endpoint, Layout, VersionRecord
from miles.weight_sync.publisher import open_publisher, stage
from miles.weight_sync.transports.base import PullError, TornRead
from miles.weight_sync.transports.rdt import RdtReader, RdtSource, expose
from tests.miles.weight_sync.harness import quick, rig
from tests.miles.weight_sync.rank_processes import RankProcess, fill, publish_for_ever
from tests.miles.weight_sync.rdt_reading import make_reader, nothing, reader_sees_a_source_stop
from tests.miles.weight_sync.tensors import SHAPES

pytestmark = pytest.mark.real

DEADLINE_S = 30.0
BIG = {f"w{index}": (1024, 1024) for index in range(8)}  # 32 MiB in float32
SOME = {f"w{index}": (1024, 1024) for index in range(3)}


def open_source(rank: RankProcess) -> tuple[Layout, Endpoint]:
    opened, exposed = rank.call(open_publisher, 2), rank.call(expose)
    assert opened.layout is not None, opened.error
    assert exposed.endpoint is not None, exposed.error
    return opened.layout, exposed.endpoint


class TrustingReader(RdtReader):
    """The negative control: believes that a slot holds what it was told."""

    def _check_headers(
        self, sources: Sequence[tuple[Layout, Endpoint]], slot: int, version: int, deadline: float
    ) -> None:
        return


@dataclass
class Tally:
    accepted: int = 0
    refused: int = 0
    torn: int = 0


def pull_until(
    enough: Callable[[Tally], bool], endpoint: Endpoint, layout: Layout, kind: type[RdtReader]
) -> Tally:
    """Pull the newest slot again and again, while the source overwrites slots without regard to readers."""
    reader, client, staging = make_reader(layout, kind)
    tally = Tally()
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and not enough(tally):
        header = client.read_header(endpoint, client.deadline(10.0))
        version, slot = max((header.slot(index)[1], index) for index in range(len(endpoint.slots)))
        if version == 0:
            continue
        source = msgspec.json.encode(RdtSource(slot, (endpoint,)))
        try:
            reader.pull(source, VersionRecord(version, 0, 1, ""), nothing)
        except TornRead:
            tally.refused += 1
            continue
        tally.accepted += 1
        found = {float(view.view(-1)[at]) for view in staging.views for at in range(0, view.numel(), 65536)}
        tally.torn += found != {float(version % 1024)}
    reader.close()
    return tally


def test_torn_bytes_are_never_accepted_from_a_fast_publisher() -> None:
    """Two slots, no lease, a publisher that never waits. The negative control reads the same source without looking
    at the header (`RdtReader._check_headers`) and does accept torn bytes, so the first half can fail."""
    with RankProcess(SOME) as rank:
        layout, endpoint = open_source(rank)
        rank.call(publish_for_ever, 20, 0.3)
        careful = pull_until(lambda t: t.accepted >= 5 and t.refused >= 20, endpoint, layout, RdtReader)
        trusting = pull_until(lambda t: t.torn >= 1, endpoint, layout, TrustingReader)
    assert careful.torn == 0
    assert careful.accepted >= 5
    assert careful.refused >= 20
    assert trusting.torn >= 1


def test_a_killed_source_is_a_failed_pull_and_a_restarted_one_serves() -> None:
    with RankProcess(SHAPES) as rank:
        layout, endpoint = open_source(rank)
        rank.call(fill, 3.0)
        assert rank.call(stage, 0, 1, [[]]).error is None
        reader, client, staging = make_reader(layout)
        source = msgspec.json.encode(RdtSource(0, (endpoint,)))
        assert reader.pull(source, VersionRecord(1, 0, 1, ""), nothing) > 0
        assert all(view.eq(3.0).all() for view in staging.views)
        rank.kill()
        with pytest.raises(PullError):
            reader.pull(source, VersionRecord(1, 0, 1, ""), nothing)
        with RankProcess(SHAPES) as again:
            layout, endpoint = open_source(again)
            again.call(fill, 4.0)
            assert again.call(stage, 1, 2, [[]]).error is None
            source = msgspec.json.encode(RdtSource(1, (endpoint,)))
            reader.pull(source, VersionRecord(2, 0, 1, ""), nothing)
            assert all(view.eq(4.0).all() for view in staging.views)
        reader.close()
        assert client.agents_made == 1


async def test_a_trainer_killed_in_mid_run_fails_publication_and_joins_but_no_serving_engine() -> None:
    with RankProcess(SHAPES) as rank:
        async with rig(runner=rank, options=quick(start_timeout_s=60.0)) as r:
            rank.call(fill, 1.0)
            await r.serving((await r.service.publish(1)).number)
            rank.kill()
            with pytest.raises(PublishFailed, match="gone"):
                await r.service.publish(2)
            assert [each.state for each in r.controller.snapshot()] == ["Serving"]
            old = r.engine()
            async with r.controller.bus.subscribe("test", kinds=(EngineStateChanged,)) as events:
                r.controller.fail("engine-0", old.incarnation, "for the test")
                async for event in events:  # the new life cannot pull: its agent votes so, and it is failed
                    assert isinstance(event, EngineStateChanged)
                    assert event.state != "Serving"
                    if event.state == "Failed" and event.incarnation != old.incarnation:
                        assert "pull" in (event.reason or "")
                        break


def test_a_source_that_stops_in_mid_read_quarantines_staging() -> None:
    """Over TCP a READ has no timeout of its own and its bytes arrive after we gave up. Fails (landed bytes would be in
    staging) if PullClient reused the memory of a READ that timed out."""
    tcp = {"UCX_TLS": "tcp,self"}
    with RankProcess(BIG, tcp) as rank, RankProcess({}, tcp) as reader:
        layout, endpoint = open_source(rank)
        rank.call(fill, 5.0)
        assert rank.call(stage, 0, 1, [[]]).error is None
        seen = reader.call(reader_sees_a_source_stop, layout, endpoint, rank.pid)
    assert seen["first"] == seen["again"] == 5.0
    assert "deadline" in str(seen["error"])
    assert 0.9 < float(str(seen["waited_s"])) < 5.0
    assert seen["replaced"]
    assert seen["quarantined"] == layout.slot_bytes
    assert float(str(seen["landed_late"])) > 0.9
    assert seen["fresh_untouched"]
    assert seen["quarantined_after"] == 0
