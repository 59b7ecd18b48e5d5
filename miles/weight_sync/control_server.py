"""The HTTP side of weight sync, in the driver: agents ask for work, renew leases and vote. No tensor bytes.

Loopback unless told otherwise; every request carries the run's bearer token, compared in constant time. An agent whose
incarnation is no longer wanted is told 410, which ends it.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web
from anyio.lowlevel import checkpoint

from controllers.errors import StaleIncarnation
from miles.weight_sync.messages import PROTOCOL, AnyVote, Ask, Job, Pull, Renew

_MAX_BODY_BYTES = 1 << 20
M = TypeVar("M")


class AgentDesk(Protocol):
    """Who answers. Each raises StaleIncarnation for an incarnation that is not followed."""

    async def next_job(self, ask: Ask) -> Job | None:
        """Work for a rank, or None after a while without any."""

    def acquire(self, ask: Ask) -> Pull | None:
        """A fresh grant for the newest version, or None when there is nothing to pull."""

    def renew(self, renew: Renew) -> bool:
        """Keep a lease; False when it is gone."""

    def vote(self, vote: AnyVote) -> None:
        """Take a vote."""


class ControlServer:
    """Serves while it is entered. `url` is valid from then on."""

    def __init__(self, desk: AgentDesk, token: str, host: str = "127.0.0.1") -> None:
        self._desk = desk
        self._token = f"Bearer {token}"
        self._host = host
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> ControlServer:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/next", self._next),
                web.post("/acquire", self._acquire),
                web.post("/renew", self._renew),
                web.post("/vote", self._vote),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, keepalive_timeout=600)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        await checkpoint()  # closed transports let go of their sockets in the loop's next round

    async def _next(self, request: web.Request) -> web.Response:
        return await self._answer(request, Ask, self._next_job)

    async def _acquire(self, request: web.Request) -> web.Response:
        async def acquire(ask: Ask) -> web.Response:
            return _job(self._desk.acquire(ask))

        return await self._answer(request, Ask, acquire)

    async def _renew(self, request: web.Request) -> web.Response:
        async def renew(message: Renew) -> web.Response:
            return web.Response(status=200 if self._desk.renew(message) else 409)

        return await self._answer(request, Renew, renew)

    async def _vote(self, request: web.Request) -> web.Response:
        async def vote(message: AnyVote) -> web.Response:
            self._desk.vote(message)
            return web.Response()

        return await self._answer(request, AnyVote, vote)

    async def _next_job(self, ask: Ask) -> web.Response:
        return _job(await self._desk.next_job(ask))

    async def _answer(
        self, request: web.Request, kind: type[M] | object, handle: Callable[[M], Awaitable[web.Response]]
    ) -> web.Response:
        """Check the token, decode, refuse another protocol, and map a stale incarnation to 410."""
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._token.encode()):
            return web.Response(status=401)
        try:
            message: M = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=str(error))
        except ConnectionResetError:  # an engine that died in mid-request; its exit is the controller's to notice
            return web.Response(status=400)
        protocol = getattr(message, "protocol", PROTOCOL)
        if protocol != PROTOCOL:
            return web.Response(status=400, text=f"protocol {protocol} is not {PROTOCOL}")
        try:
            return await handle(message)
        except StaleIncarnation as error:
            return web.Response(status=410, text=error.message)


def _job(job: Job | None) -> web.Response:
    if job is None:
        return web.Response(status=204)
    return web.Response(body=msgspec.json.encode(job), content_type="application/json")
