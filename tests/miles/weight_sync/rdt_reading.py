"""Reading slots without a service, here or in a process of its own."""

from __future__ import annotations

import os
import signal
import time

import msgspec
import torch

from miles.weight_sync.messages import Endpoint, Layout, VersionRecord
from miles.weight_sync.plan import full_layout
from miles.weight_sync.pull_client import PullClient
from miles.weight_sync.staging import Staging
from miles.weight_sync.transports.base import PullError, ReaderOptions
from miles.weight_sync.transports.rdt import RdtReader, RdtSource
from tests.miles.weight_sync.rank_processes import ProcessContext

MB = 1 << 20


def nothing() -> None:
    """No lease to renew."""


def make_reader(
    layout: Layout, kind: type[RdtReader] = RdtReader, *, timeout_s: float = 10.0, chunk_bytes: int = MB
) -> tuple[RdtReader, PullClient, Staging]:
    staging = Staging(full_layout([layout]), torch.device("cpu"))
    client = PullClient("reader", staging, chunk_bytes, 1 << 30)
    options = ReaderOptions("reader", (layout,), timeout_s, chunk_bytes, 1 << 30)
    return kind(client, staging, options), client, staging


def reader_sees_a_source_stop(
    context: ProcessContext, layout: Layout, endpoint: Endpoint, pid: int
) -> dict[str, object]:
    """Runs in the reader's process: a good pull, one of a stopped source, and one after it goes on."""
    reader, client, staging = make_reader(layout, timeout_s=1.0, chunk_bytes=1 << 30)
    source = msgspec.json.encode(RdtSource(0, (endpoint,)))
    record = VersionRecord(1, 0, 1, "")
    seen: dict[str, object] = {}
    reader.connect(source)
    reader.pull(source, record, nothing)
    seen["first"] = float(staging.views[0][0, 0])
    staging.flat.zero_()
    first = staging.flat
    deadline = client.deadline(1.0)
    started = time.monotonic()

    def stop_once() -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        regions = [region for regions in reader._plan.values() for region in regions]
        client.read(endpoint, 0, regions, deadline, stop_once)
    except PullError as error:
        seen["error"] = str(error)
    seen["waited_s"] = time.monotonic() - started
    seen["replaced"] = staging.flat.data_ptr() != first.data_ptr()
    seen["quarantined"] = client.quarantined_bytes
    os.kill(pid, signal.SIGCONT)
    late = time.monotonic() + 10
    while client.quarantined_bytes and time.monotonic() < late:
        client._reap()
        os.sched_yield()  # NIXL has no event: its owner polls
    seen["landed_late"] = float(first.view(torch.float32).eq(5.0).float().mean())
    seen["fresh_untouched"] = bool(staging.flat.eq(0).all())
    reader.pull(source, record, nothing)
    seen["again"] = float(staging.views[-1][-1, -1])
    seen["quarantined_after"] = client.quarantined_bytes
    reader.close()
    return seen
