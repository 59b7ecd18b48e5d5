"""Ports for servers of this machine, handed out so that two of ours never get the same one.

A probe by `bind` alone is a race: between it and the server's own `bind` another host may probe the same port. So a
port is also held under a name in Linux's abstract socket namespace (no file, gone with its process) for as long as
its server lives. Programs that are not ours may still take it; their users retry when the server says so.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from types import TracebackType
from typing import Self

from controllers.errors import PortTaken

PROBES = 64


class PortReservation:
    """A port held by this process until `release`, or until the process ends."""

    def __init__(self, port: int, hold: socket.socket) -> None:
        self.port = port
        self._hold = hold

    def release(self) -> None:
        """Give it back. Idempotent."""
        self._hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def reserve_port(host: str, port: int | None = None) -> PortReservation:
    """Reserve `port`, or any free one, for a server that will bind `host`. Raises PortTaken."""
    for _ in range(PROBES):
        free = _probe(host, port or 0)
        hold = _hold(free) if free is not None else None
        if free is not None and hold is not None:
            return PortReservation(free, hold)
        if port:
            raise PortTaken(f"port {port} of {host} is taken", port=port, host=host)
    raise PortTaken(f"no free port on {host} in {PROBES} probes", port=0, host=host)


def _probe(host: str, port: int) -> int | None:
    """The port bound for a moment, or None when it is in use. A server's closed connections do not count."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        bound: int = probe.getsockname()[1]
        return bound


def _hold(port: int) -> socket.socket | None:
    hold = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        hold.bind(f"\0miles-port-{port}")
    except OSError as error:
        hold.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return hold


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host.strip("[]")).version == 6 else socket.AF_INET
    except ValueError:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
