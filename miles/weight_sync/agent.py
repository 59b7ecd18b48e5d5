"""The pull agent in an engine's process, entered by its weight loader hook as `miles.weight_sync.agent.load`.

`start` begins one thread per incarnation: it asks for work, brings versions into staging while the engine generates,
verifies and votes. `install` runs in the engine's own thread, under pause: one copy from staging to live parameters.
Nothing raises into the engine: a failure is a vote, and an engine without its vote is not served from.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Iterable

import msgspec
import torch

from miles.weight_sync.control_client import ControlClient, ControlLost, NoLongerWanted
from miles.weight_sync.messages import (
    PROTOCOL,
    Audit,
    Audited,
    Command,
    Failed,
    Install,
    Installed,
    Pull,
    PullFailed,
    Ready,
    Staged,
    Start,
)
from miles.weight_sync.parameters import bind
from miles.weight_sync.plan import full_layout
from miles.weight_sync.staging import Staging
from miles.weight_sync.transports.base import PullError, Reader, ReaderOptions, TornRead, find_transport

_PULL_ATTEMPTS = 3
_JOIN_TIMEOUT_S = 2.0
_CONTROL_ATTEMPTS = 7
"""About six seconds without a control server end the agent."""

_log = logging.getLogger(__name__)
_agents: dict[str, PullAgent] = {}
_agents_lock = threading.Lock()


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The weight loader: one uint8 tensor `manifest` holds a command. Never raises."""
    try:
        manifest = dict(named_tensors)["manifest"]
        command = msgspec.json.decode(bytes(manifest.cpu().numpy().tobytes()), type=Command)
        if command.protocol != PROTOCOL:
            _log.error("weight sync speaks protocol %s here, not %s", PROTOCOL, command.protocol)
            return
        if isinstance(command, Start):
            _start(model, command)
        else:
            _install(command)
    except Exception:  # noqa: BLE001 - one here ends a whole inference server; the missing vote fails the engine
        _log.exception("weight sync command failed")


def _start(model: torch.nn.Module, command: Start) -> None:
    with _agents_lock:
        if command.incarnation in _agents:
            return
        replaced = [name for name, agent in _agents.items() if agent.model is model]
        old = [_agents.pop(name) for name in replaced]
        agent = _agents[command.incarnation] = PullAgent(model, command)
    for each in old:
        each.close()
    agent.begin()


def _install(command: Install) -> None:
    agent = _agents.get(command.incarnation)
    if agent is None:
        _log.error("no pull agent runs for %s", command.incarnation)
        return
    agent.install(command.version)


def close_all() -> None:
    """End every agent of this process: peers are disconnected cleanly."""
    with _agents_lock:
        agents = list(_agents.values())
        _agents.clear()
    for agent in agents:
        agent.close()


atexit.register(close_all)


class PullAgent:
    """One rank's agent. Staging is written by its thread, and read by `install` under the lock."""

    def __init__(self, model: torch.nn.Module, command: Start) -> None:
        self.model = model
        self._command = command
        self._rank, self._world = _tensor_parallel_rank()
        self._control = self._client(_CONTROL_ATTEMPTS)
        self._installing = self._client(attempts=3)
        self._lock = threading.Lock()
        self._staged: tuple[int, str] | None = None
        self._targets: list[torch.Tensor] = []
        self._staging: Staging | None = None
        self._readers: dict[str, Reader] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="miles-pull-agent", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, and with it every connection."""
        self._closing = True
        self._control.interrupt()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def install(self, version: int) -> None:
        """Copy `version` from staging into the live parameters and vote; a failure is a vote too."""
        start = time.perf_counter()
        try:
            with self._lock:
                if self._staged is None or self._staged[0] != version:
                    raise PullError(f"version {version} is not staged, but {self._staged}")
                assert self._staging is not None
                self._copy(self._staging)
                digest = self._staged[1]
            install_s = time.perf_counter() - start
            self._installing.vote(
                Installed(
                    incarnation=self._command.incarnation,
                    rank=self._rank,
                    version=version,
                    digest=digest,
                    install_s=install_s,
                )
            )
        except Exception as error:  # noqa: BLE001 - recorded as a vote, which fails the engine
            _log.exception("install of version %s failed", version)
            self._vote_failed(self._installing, f"install of version {version}: {error!r}")

    def _copy(self, staging: Staging) -> None:
        cuda = staging.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(staging.device)  # before the first live write: no kernel may still read them
        with torch.inference_mode():
            torch._foreach_copy_(self._targets, staging.views)
        if cuda:
            torch.cuda.synchronize(staging.device)

    def _run(self) -> None:
        try:
            self._open()
            self._control.vote(Ready(incarnation=self._command.incarnation, rank=self._rank))
            while not self._closing:
                job = self._control.next_job()
                if isinstance(job, Pull):
                    self._pull(job)
                elif isinstance(job, Audit):
                    self._audit(job.version)
        except (NoLongerWanted, ControlLost) as error:
            _log.info("pull agent of %s ends: %s", self._command.incarnation, error)
        except Exception as error:  # noqa: BLE001 - recorded as a vote, which fails the engine
            _log.exception("pull agent of %s failed", self._command.incarnation)
            self._vote_failed(self._control, repr(error))
        finally:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
            self._control.close()
            self._installing.close()
            with _agents_lock:
                if _agents.get(self._command.incarnation) is self:
                    del _agents[self._command.incarnation]

    def _open(self) -> None:
        """Staging, live views and warm connections, before the first version is asked for."""
        if self._world > 1:
            raise NotImplementedError(f"weight sync into {self._world} tensor-parallel ranks")
        layout = full_layout(self._command.layouts)
        self._targets = bind(self.model, layout)
        device = self._targets[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._staging = Staging(layout, device)
        try:
            self._reader(self._command.transport).connect(bytes(self._command.source))
        except PullError as error:
            _log.warning("no connection to the trainer yet: %s", error)  # the pull itself will say so, and fall back

    def _reader(self, transport: str) -> Reader:
        if transport not in self._readers:
            assert self._staging is not None
            command = self._command
            options = ReaderOptions(
                f"engine-{command.incarnation}-{self._rank}",
                command.layouts,
                command.pull_timeout_s,
                command.chunk_bytes,
                command.quarantine_bytes,
            )
            self._readers[transport] = find_transport(transport).reader(self._staging, options)
        return self._readers[transport]

    def _pull(self, job: Pull) -> None:
        """Stage what the job names, or a newer version when that is overwritten meanwhile; vote how it went."""
        assert self._staging is not None
        with self._lock:  # waits for an install that still reads staging
            self._staged = None
        start = time.perf_counter()
        reason = ""
        for _ in range(_PULL_ATTEMPTS):
            try:
                nbytes = self._reader(job.transport).pull(bytes(job.source), job.record, Renewal(self._control, job))
                digest = self._staging.digest()
                if digest != job.record.digest:
                    raise TornRead(f"version {job.record.version} has digest {digest}, not {job.record.digest}")
            except TornRead as error:
                reason = str(error)
                fresh = self._control.acquire()
                if fresh is None:
                    break
                job = fresh
                continue
            except PullError as error:
                reason = str(error)
                break
            self._staged = (job.record.version, digest)
            self._control.vote(
                Staged(
                    incarnation=self._command.incarnation,
                    rank=self._rank,
                    version=job.record.version,
                    digest=digest,
                    lease=job.lease,
                    nbytes=nbytes,
                    pull_s=time.perf_counter() - start,
                )
            )
            return
        self._control.vote(
            PullFailed(
                incarnation=self._command.incarnation,
                rank=self._rank,
                version=job.record.version,
                lease=job.lease,
                reason=reason,
            )
        )

    def _audit(self, version: int) -> None:
        assert self._staging is not None
        digest = self._staging.digest_of(self._targets)
        self._control.vote(
            Audited(incarnation=self._command.incarnation, rank=self._rank, version=version, digest=digest)
        )

    def _vote_failed(self, control: ControlClient, reason: str) -> None:
        try:
            control.vote(Failed(incarnation=self._command.incarnation, rank=self._rank, reason=reason))
        except Exception:  # noqa: BLE001 - the missing vote fails the engine by its deadline
            _log.exception("the vote that says so failed too")

    def _client(self, attempts: int) -> ControlClient:
        command = self._command
        return ControlClient(command.control_url, command.token, command.incarnation, self._rank, attempts)


class Renewal:
    """Renews a job's lease when a third of its time has passed. A lost lease is found out by the source's header."""

    def __init__(self, control: ControlClient, job: Pull) -> None:
        self._control = control
        self._job = job
        self._due = time.monotonic() + job.lease_ttl_s / 3

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._job.lease_ttl_s / 3
            self._control.renew(self._job.lease)


def _tensor_parallel_rank() -> tuple[int, int]:
    """(rank, world size) of this process in its engine; SGLang's where it is SGLang, else alone."""
    distributed = sys.modules.get("sglang.srt.distributed")
    if distributed is None:
        return 0, 1
    return distributed.get_tensor_model_parallel_rank(), distributed.get_tensor_model_parallel_world_size()
