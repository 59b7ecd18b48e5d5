"""A driver for tests that end it: a watchdog, Ray, and an engine host with a tiny engine in it.

    python -m tests.support.watched_driver FOLDER [leave]

Prints one JSON line (pids, ports, Ray's folder) once all is up, then waits; with `leave` it leaves in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import psutil

from controllers.ports import LaunchSpec
from miles.cluster.ray_cluster import RayCluster, RayOptions
from miles.cluster.watchdog import Watchdog
from miles.engines.launcher import LauncherOptions, RayEngineLauncher
from miles.engines.sglang_client import SGLangClient
from tests.support.tiny_command import TinyCommand


async def main(folder: Path, *, leave: bool) -> None:
    segment_prefix = f"miles-test-{os.getpid()}-"
    options = LauncherOptions(folder, folder, kind="tiny")
    async with (
        Watchdog() as watchdog,
        RayCluster(RayOptions(num_cpus=2, object_store_bytes=80 * 1024 * 1024), watchdog) as ray_cluster,
        SGLangClient() as client,
    ):
        watchdog.watch_shm(segment_prefix)
        segment = Path("/dev/shm", f"{segment_prefix}weights")
        segment.touch()  # noqa: ASYNC240
        launcher = RayEngineLauncher(options, client, {"tiny": lambda _, spec: TinyCommand(spec.weight_version)})
        engine = await launcher.launch(LaunchSpec("engine-0", "engine-0.1", "engine-0.1:none"))
        children = psutil.Process().children(recursive=True)
        ports = {
            connection.laddr.port
            for process in children
            if process.pid != watchdog.pid
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        report = {
            "pids": [process.pid for process in children],
            "watchdog": watchdog.pid,
            "engine": engine.pid,
            "host": engine.host_pid,
            "ports": sorted(ports),
            "folder": str(ray_cluster.folder),
            "segment": str(segment),
        }
        print(json.dumps(report), flush=True)
        if not leave:
            await asyncio.Event().wait()
        await engine.stop(5)
        segment.unlink()  # noqa: ASYNC240


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), leave="leave" in sys.argv[2:]))
