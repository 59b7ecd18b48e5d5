"""Ray for the time of a run: starts a local cluster, or attaches to one, and leaves nothing behind.

A local cluster lives in a folder of its own with a short path (the names of its sockets end at 107 bytes). Ray is
started and stopped from one thread that lives as long as the cluster: Ray asks the kernel to kill its daemons when
the thread that made them ends. Called by the assembly, inside a `Watchdog`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import anyio
import ray
import structlog

from controllers.errors import ConfigError, InfrastructureError
from miles.cluster import reaper
from miles.cluster.signals import reinstall_handlers

log = structlog.get_logger(__name__)

T = TypeVar("T")

LONGEST_TEMP_ROOT = 32
"""Ray appends up to 66 bytes to the folder's path (`/miles-12345678` included), of the 107 a socket's name may have."""
SHUTDOWN_DEADLINE_S = 10.0

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts workers at nice 15: beside the driver on the same cores the trainer would starve.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


class Recorder(Protocol):
    """The part of `Watchdog` that a cluster needs."""

    def watch_marker(self, name: str) -> None: ...

    def watch_folder(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class RayOptions:
    """`address` None starts a local cluster; the sizes are for that case only. `num_cpus` None means all."""

    address: str | None = None
    namespace: str = "miles"
    num_cpus: int | None = None
    num_gpus: int | None = None
    object_store_bytes: int = 200 * 1024 * 1024
    log_to_driver: bool = False
    temp_root: str = "/tmp"


def gpu_count() -> float:
    """GPUs of all nodes of the cluster that this process is connected to, in use or not."""
    return float(ray.cluster_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


class RayCluster:
    """An async context manager around Ray's connection of this process."""

    def __init__(self, options: RayOptions, recorder: Recorder | None = None) -> None:
        if options.address is None and len(options.temp_root) > LONGEST_TEMP_ROOT:
            raise ConfigError(
                f"cluster.temp_root {options.temp_root!r} is longer than {LONGEST_TEMP_ROOT} bytes, "
                "and the names of Ray's sockets would not fit"
            )
        self._options = options
        self._recorder = recorder
        self._thread: ThreadPoolExecutor | None = None
        self._marker = f"MILES_RUN_{secrets.token_hex(6).upper()}"
        self.folder: Path | None = None
        """The local cluster's folder; None when attached to one that somebody else runs."""

    async def __aenter__(self) -> Self:
        if ray.is_initialized():
            if self._options.address is not None:
                raise InfrastructureError(f"this process is connected to Ray already, not to {self._options.address!r}")
            log.info("ray_in_use", detail="this process is connected to Ray already; it is used and left as it is")
            return self
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        try:
            await self._in_thread(self._start)
        except BaseException:
            await self._close()
            raise
        finally:
            reinstall_handlers()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    def _start(self) -> None:
        options = self._options
        if options.address is not None:
            with _environment(_RAY_ENVIRONMENT):
                ray.init(
                    address=options.address,
                    namespace=options.namespace,
                    log_to_driver=options.log_to_driver,
                    logging_level=logging.ERROR,
                )
            return
        self.folder = Path(tempfile.mkdtemp(prefix="miles-", dir=options.temp_root))
        if self._recorder is not None:
            self._recorder.watch_folder(self.folder)
            self._recorder.watch_marker(self._marker)
        # Only what Ray starts inherits the marker, never another child of a person's own program.
        with _environment({**_RAY_ENVIRONMENT, self._marker: "1"}):
            ray.init(
                address="local",  # None would attach to whatever RAY_ADDRESS names
                num_cpus=options.num_cpus or os.cpu_count(),
                num_gpus=options.num_gpus,
                object_store_memory=options.object_store_bytes,
                namespace=options.namespace,
                include_dashboard=False,
                log_to_driver=options.log_to_driver,
                logging_level=logging.ERROR,
                _temp_dir=str(self.folder),
                _node_ip_address="127.0.0.1",
            )

    async def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with anyio.CancelScope(shield=True):
            shutdown = asyncio.get_running_loop().run_in_executor(thread, ray.shutdown)
            _, late = await asyncio.wait({shutdown}, timeout=SHUTDOWN_DEADLINE_S)
            if late:
                log.warning("ray_shutdown_late", deadline_s=SHUTDOWN_DEADLINE_S)
            await anyio.to_thread.run_sync(self._sweep)
            if not late:
                shutdown.result()
            thread.shutdown(wait=False)

    def _sweep(self) -> None:
        """Whatever `ray.shutdown` left: its agents outlive it by seconds, and its folder stays."""
        if self.folder is None:
            return
        belongings = reaper.Belongings()
        belongings.markers.add(self._marker)
        belongings.folders.add(str(self.folder))
        left = reaper.end_processes(belongings)
        if left:
            log.warning("ray_processes_left", pids=sorted(process.pid for process in left))
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
