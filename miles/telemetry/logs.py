"""Where structlog writes: readable lines on standard error, JSON lines in the run folder.

`log_to_console` is for commands that have no run folder; a run enters `log_to` for as long as it lasts. Loggers of
the standard library (asyncio, aiohttp, ray) join the latter at WARNING.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]


def log_to_console(level: Level = "info") -> None:
    """Log to standard error (structlog's own default is standard output, where commands print their results)."""
    _configure(level, sinks=[], console_level=level)


@contextmanager
def log_to(file: Path, level: Level = "info", console_level: Level | None = None) -> Iterator[None]:
    """Log to `file`, as JSON lines of at least `level`, and to standard error, of at least `console_level`.

    `console_level` None is the same level. Tracebacks are shown on the console at `debug` only, since the file has
    them. What was configured before is put back on leaving.
    """
    before = structlog.get_config() if structlog.is_configured() else None
    handler = _ForwardHandler(logging.WARNING)
    root = logging.getLogger()
    with file.open("ab", buffering=0) as stream:
        _configure(level, sinks=[_FileSink(stream)], console_level=console_level or level)
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)
            structlog.reset_defaults()
            if before is not None:
                structlog.configure(**before)


def _configure(level: Level, sinks: list[Processor], console_level: Level) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.format_exc_info,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *sinks,
            _ConsoleGate(_number(console_level), hide_tracebacks=bool(sinks) and console_level != "debug"),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


class _FileSink:
    """A processor that writes the event and passes it on."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        self._stream.write(orjson.dumps(dict(event), option=orjson.OPT_APPEND_NEWLINE, default=repr))
        return event


class _ConsoleGate:
    """A processor that keeps events below a level off the console, and tracebacks that the file has."""

    def __init__(self, level: int, hide_tracebacks: bool) -> None:
        self._level = level
        self._hide_tracebacks = hide_tracebacks

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if _number(str(event["level"])) < self._level:
            raise structlog.DropEvent
        if self._hide_tracebacks:
            event.pop("exception", None)
        return event


class _StderrLogger:
    """The last link: prints to what is standard error at that moment, which a live display may have replaced."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, message: str) -> None:
        print(message, file=sys.stderr)

    debug = info = warning = error = critical = log = msg


class _ForwardHandler(logging.Handler):
    """Hands records of the standard library's loggers to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        details: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        logger = structlog.get_logger(record.name)
        logger.log(min(record.levelno, logging.CRITICAL), record.getMessage(), **details)
