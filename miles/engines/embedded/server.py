"""SGLang's HTTP API over the scheduler: parses, checks, streams; decides nothing about scheduling.

    handler task per request: body -> Request -> scheduler.submit; chunks <- TokenOutput
    a handler that ends early (client gone) aborts its request by id

Everything but `/generate` and `/health_generate` answers without waiting for a token, `/health` without waiting for
the scheduler at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from miles.engines.embedded.options import EngineOptions
from miles.engines.embedded.output import StreamPacer, TokenOutput
from miles.engines.embedded.request import Limits, RequestRefused, parse_request
from miles.engines.embedded.scheduler import PauseMode, Scheduler
from miles.engines.embedded.weight_update import WeightUpdater

_MAX_BODY_BYTES = 1 << 30
_PROBE_TIMEOUT_S = 20.0
_SGLANG_API = "0.5.23"
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "in_place"}

Body = dict[str, Any]


class EngineServer:
    """The routes of one engine."""

    def __init__(self, scheduler: Scheduler, updater: WeightUpdater, limits: Limits, options: EngineOptions) -> None:
        self._scheduler = scheduler
        self._updater = updater
        self._limits = limits
        self._options = options
        self._live: dict[str, TokenOutput] = {}
        self._pacer = StreamPacer(options.stream_delay_ms / 1000)
        self._probes = 0

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        calls: dict[str, Callable[[Body], Awaitable[Body]]] = {
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/begin_weight_update": self._begin_update,
            "/end_weight_update": self._end_update,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weight_version": self._update_version,
            "/weights_checker": self._check_weights,
            "/flush_cache": self._flush_cache,
        }
        for path, call in calls.items():
            app.router.add_post(path, _json_call(call))
        for path in ("/health", "/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            app.router.add_get(path, self._info)
        app.router.add_get("/health_generate", self._health_generate)
        app.router.add_get("/get_load", self._load)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            call = parse_request(await _read_body(request), self._limits)
            self._check_admission(call.rid)
        except RequestRefused as refusal:
            return _refused(refusal)
        output = TokenOutput(
            call.rid,
            len(call.prompt),
            return_logprob=call.return_logprob,
            pacer=self._pacer if call.stream else None,
            masks=call.sampling.masks,
        )
        self._live[call.rid] = output
        self._scheduler.submit(call.request(output))
        try:
            if not call.stream:
                return _json(await output.next_chunk())
            return await _stream(request, output)
        except ConnectionResetError:
            return web.Response()  # nobody is there to read it
        finally:
            del self._live[call.rid]
            if not output.finished:
                self._scheduler.abort(call.rid)

    def _check_admission(self, rid: str) -> None:
        if rid in self._live:
            raise RequestRefused(f"rid={rid!r} is the id of a live request")
        if self._scheduler.queued >= self._options.max_queued_requests:
            raise RequestRefused(f"{self._scheduler.queued} requests are queued already (--max-queued-requests)", 503)

    async def _abort_request(self, body: Body) -> Body:
        rid = body.get("rid")
        if body.get("abort_all"):
            self._scheduler.abort_all()
        elif isinstance(rid, str) and rid:
            self._scheduler.abort(rid)
        else:
            raise RequestRefused("abort_request wants a rid, or abort_all")
        return {}

    async def _pause(self, body: Body) -> Body:
        mode = body.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise RequestRefused(f"mode={mode!r} must be one of {', '.join(_PAUSE_MODES)}")
        await self._scheduler.pause(_PAUSE_MODES[mode])
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: Body) -> Body:
        await self._scheduler.resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _begin_update(self, body: Body) -> Body:
        self._updater.begin()
        return {"success": True, "message": "ok"}

    async def _end_update(self, body: Body) -> Body:
        self._updater.end()
        return {"success": True, "message": "ok"}

    async def _update_from_tensor(self, body: Body) -> Body:
        if body.get("abort_all_requests"):
            self._scheduler.abort_all()
        await self._updater.from_tensors(
            body.get("serialized_named_tensors"),
            body.get("load_format"),
            flush_cache=bool(body.get("flush_cache", True)),
            version=body.get("weight_version"),
        )
        return {"success": True, "message": "ok"}

    async def _update_from_disk(self, body: Body) -> Body:
        path = body.get("model_path")
        if not isinstance(path, str):
            raise RequestRefused("update_weights_from_disk wants a model_path")
        if body.get("abort_all_requests"):
            self._scheduler.abort_all()
        await self._updater.from_disk(
            Path(path), flush_cache=bool(body.get("flush_cache", True)), version=body.get("weight_version")
        )
        return {"success": True, "message": "ok", "num_paused_requests": 0}

    async def _update_version(self, body: Body) -> Body:
        version = body.get("new_version")
        if not isinstance(version, str):
            raise RequestRefused("update_weight_version wants new_version, a string")
        if body.get("abort_all_requests", True):
            self._scheduler.abort_all()
        await self._scheduler.set_weight_version(version)
        return {"success": True, "message": f"Weight version updated to {version}", "new_version": version}

    async def _check_weights(self, body: Body) -> Body:
        action = body.get("action", "checksum")
        if action != "checksum":
            raise RequestRefused(f"action={action!r} is not supported by the embedded engine, only checksum")
        return await self._updater.checksum()

    async def _flush_cache(self, body: Body) -> Body:
        await self._scheduler.flush_cache()
        return {"success": True, "message": "Cache flushed."}

    async def _info(self, request: web.Request) -> web.Response:
        scheduler, options, config = self._scheduler, self._options, self._scheduler.model.config
        return _json(
            {
                "status": "paused" if scheduler.paused else "ok",
                "engine": "miles-embedded",
                "version": _SGLANG_API,
                "tensor_encoding": "safetensors",
                "pid": os.getpid(),
                "model_path": str(options.model_path),
                "architecture": config.architecture,
                "dtype": str(scheduler.model.dtype).removeprefix("torch."),
                "vocab_size": config.vocab_size,
                "weight_version": scheduler.weight_version,
                "running": scheduler.running,
                "queued": scheduler.queued,
                "tokens_generated": scheduler.tokens_generated,
                "steps": scheduler.steps,
                "max_running_requests": options.max_running_requests,
                "max_total_num_tokens": self._limits.max_total_tokens,
                "context_length": self._limits.context_length,
                "tp_size": 1,
                "is_generation": True,
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        scheduler = self._scheduler
        return _json(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": scheduler.running + scheduler.queued,
                    "num_waiting_reqs": scheduler.queued,
                    "num_tokens": scheduler.held_tokens,
                }
            ]
        )

    async def _health_generate(self, request: web.Request) -> web.Response:
        """Generate one token; 503 when none comes in time, as when generation is paused."""
        self._probes += 1
        body = {
            "input_ids": [0],
            "rid": f"HEALTH_CHECK_{self._probes}",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        call = parse_request(body, self._limits)
        output = TokenOutput(call.rid, 1, return_logprob=False, pacer=None)
        self._scheduler.submit(call.request(output))
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await output.next_chunk()
        except TimeoutError:
            return web.Response(status=503)
        finally:
            if not output.finished:
                self._scheduler.abort(call.rid)
        return web.Response()


async def _stream(request: web.Request, output: TokenOutput) -> web.StreamResponse:
    """Send chunks as server-sent events until the request has ended."""
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    await response.prepare(request)
    while True:
        chunk = b"data: " + orjson.dumps(await output.next_chunk()) + b"\n\n"
        if output.finished:
            await response.write_eof(chunk + b"data: [DONE]\n\n")
            return response
        await response.write(chunk)


def _json_call(call: Callable[[Body], Awaitable[Body]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        try:
            return _json(await call(await _read_body(request)))
        except RequestRefused as refusal:
            return _refused(refusal)

    return handler


async def _read_body(request: web.Request) -> Body:
    raw = await request.read()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return body


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _refused(refusal: RequestRefused) -> web.Response:
    message = str(refusal)
    return _json({"success": False, "message": message, "error": {"message": message}}, refusal.status)
