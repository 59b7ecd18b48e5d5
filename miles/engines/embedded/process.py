"""The engine's process: builds the parts, serves until SIGTERM or SIGINT, leaves within two seconds.

Exit codes: 0 after a signal, 2 for a wrong option, model folder or taken port (one line on standard error), 1 after a
failure of the scheduler or of a custom weight loader (a traceback).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from controllers.errors import ConfigError, MilesError, PortTaken
from miles.engines.embedded.options import EngineOptions, parse_options

if TYPE_CHECKING:
    from miles.engines.embedded.scheduler import Scheduler
    from miles.engines.embedded.server import EngineServer

_LEAVE_TIMEOUT_S = 1.8
_STREAMS_TIMEOUT_S = 0.5
_STEP_TIMEOUT_S = 0.5
_BACKLOG = 1024


def main(argv: Sequence[str]) -> int:
    """Run one engine; returns the exit code."""
    options = parse_options(argv)
    try:
        # First of all: a taken port shows at once, not after torch is imported and the model read.
        with bind(options.host, options.port) as listener:
            scheduler, server = build(options)
            # Torch's hundreds of thousands of objects stay: collections must not walk through them again and again.
            gc.collect()
            gc.freeze()
            asyncio.run(serve(scheduler, server, listener))
    except MilesError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; who connects before the model is ready waits.

    Raises PortTaken, or ConfigError for an address that is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # At once: two sockets that only bind, with SO_REUSEADDR, would both have the port.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} on {host} is taken by another process", port=port) from error
        raise ConfigError(f"cannot listen on {host!r} port {port}: {error.strerror}") from error
    return listener


def build(options: EngineOptions) -> tuple[Scheduler, EngineServer]:
    """The model and everything around it. Raises ConfigError for a folder or loader that cannot be used."""
    # Here and not above, so that options and the port are checked before two seconds go into importing torch.
    import torch

    from miles.engines.embedded.checkpoint import load_model_weights
    from miles.engines.embedded.model import Decoder
    from miles.engines.embedded.model_config import read_model_config
    from miles.engines.embedded.prefix_cache import PrefixCache
    from miles.engines.embedded.request import Limits
    from miles.engines.embedded.sampler import Sampler
    from miles.engines.embedded.scheduler import Scheduler
    from miles.engines.embedded.server import EngineServer
    from miles.engines.embedded.weight_update import WeightUpdater, import_loaders

    torch.set_num_threads(options.threads)
    config = read_model_config(options.model_path)
    context = options.context_length or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context} exceeds the model's max_position_embeddings {config.max_position_embeddings}"
        )
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
        config.dtype if options.dtype == "auto" else options.dtype
    )
    if dtype is None:
        raise ConfigError(f"config.json: dtype={config.dtype!r} is not supported (float32, bfloat16); set --dtype")
    model = Decoder(config, dtype, context)
    if options.load_format == "dummy":
        model.initialize(options.random_seed)
    else:
        load_model_weights(model, options.model_path)
    max_total_tokens = options.max_total_tokens or options.max_running_requests * context
    scheduler = Scheduler(
        model,
        Sampler(options.random_seed),
        PrefixCache(options.prefix_cache_tokens),
        slots=options.max_running_requests,
        max_total_tokens=max_total_tokens,
        chunk=options.chunked_prefill_size,
        weight_version=options.weight_version,
    )
    updater = WeightUpdater(scheduler, import_loaders(options.custom_weight_loaders))
    limits = Limits(config.vocab_size, context, max_total_tokens, frozenset(config.eos_token_ids))
    return scheduler, EngineServer(scheduler, updater, limits, options)


async def serve(scheduler: Scheduler, server: EngineServer, listener: socket.socket) -> None:
    """Serve on a listening socket until a signal; requests that run then end as aborted."""
    from aiohttp import web

    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    scheduler.start(loop)
    # Without handler_cancellation a client that goes away while its request is queued would not be noticed.
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=_STREAMS_TIMEOUT_S
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    host, port = listener.getsockname()[:2]
    print(f"engine pid {os.getpid()} serves on http://{host}:{port}", flush=True)
    await leave.wait()
    # A thread that a custom loader started may not be a daemon, or a step may hang: leave all the same.
    deadline = threading.Timer(_LEAVE_TIMEOUT_S, os._exit, args=(0,))
    deadline.daemon = True
    deadline.start()
    scheduler.abort_all()
    await runner.cleanup()
    await asyncio.to_thread(scheduler.stop, _STEP_TIMEOUT_S)
