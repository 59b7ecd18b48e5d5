"""One Ray for all tests of a module: `with ray_session(): ...` in a module-scoped fixture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from miles.cluster.ray_cluster import RayCluster, RayOptions


@contextlib.contextmanager
def ray_session() -> Iterator[RayCluster]:
    """Start Ray, and leave nothing of it behind."""
    with asyncio.Runner() as runner:
        cluster = RayCluster(RayOptions(num_cpus=2, object_store_bytes=80 * 1024 * 1024))
        runner.run(cluster.__aenter__())
        try:
            yield cluster
        finally:
            runner.run(cluster.__aexit__(None, None, None))
