"""The agent's side of the control server: one kept-alive connection per user, standard library only.

Requests are idempotent, so a broken connection is tried again, a bounded number of times.
"""

from __future__ import annotations

import http.client
import socket
import threading
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from miles.weight_sync.messages import PROTOCOL, AnyVote, Ask, Job, Pull, Renew

_TIMEOUT_S = 60.0
_FIRST_BACKOFF_S = 0.1
M = TypeVar("M")


class ControlLost(Exception):
    """The control server does not answer any more, or `interrupt` was called."""


class NoLongerWanted(Exception):
    """The control server has another incarnation by now."""


class ControlRefused(Exception):
    """The control server refused a request: another token, or another version of the protocol."""


class ControlClient:
    """Speaks for one rank of one incarnation. Used by one thread, except for `interrupt`."""

    def __init__(self, url: str, token: str, incarnation: str, rank: int, attempts: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._ask = Ask(PROTOCOL, incarnation, rank)
        self._attempts = attempts
        self._interrupted = threading.Event()

    def next_job(self) -> Job | None:
        """Wait for work; None when there was none for a while."""
        _, body = self._post("/next", self._ask)
        return msgspec.json.decode(body, type=Job) if body else None

    def acquire(self) -> Pull | None:
        """A fresh grant, for the newest version."""
        _, body = self._post("/acquire", self._ask)
        return msgspec.json.decode(body, type=Pull) if body else None

    def renew(self, lease: str) -> bool:
        """Keep a lease; False when it is gone."""
        status, _ = self._post("/renew", Renew(PROTOCOL, self._ask.incarnation, self._ask.rank, lease))
        return status == 200

    def vote(self, vote: AnyVote) -> None:
        """Say something of this rank."""
        self._post("/vote", vote)

    def interrupt(self) -> None:
        """From any thread: end a wait, and refuse to start another."""
        self._interrupted.set()
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it was closed meanwhile

    def close(self) -> None:
        """Close the connection; a later request would open another."""
        self._connection.close()

    def _post(self, path: str, message: msgspec.Struct) -> tuple[int, bytes]:
        body = msgspec.json.encode(message)
        backoff_s = _FIRST_BACKOFF_S
        for attempt in range(self._attempts):
            if self._interrupted.is_set():
                break
            try:
                self._connection.request("POST", path, body, self._headers)
                response = self._connection.getresponse()
                status, answer = response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                lost = error
                if attempt and self._interrupted.wait(backoff_s):  # the first retry is for a connection gone stale
                    break
                backoff_s *= 2
                continue
            if status == 410:
                raise NoLongerWanted(answer.decode(errors="replace"))
            if status in (400, 401):
                raise ControlRefused(f"{path}: HTTP {status} {answer.decode(errors='replace')}")
            if status not in (200, 204, 409):
                raise ControlLost(f"{path}: HTTP {status}")
            return status, answer
        raise ControlLost(f"{path}: {'interrupted' if self._interrupted.is_set() else lost}")
