"""What ended a run: the one error inside the groups that task groups make, and what to call it."""

from __future__ import annotations

import asyncio

from controllers.errors import MilesError

_STOPS = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)


def root_cause(error: BaseException) -> BaseException:
    """The error at the bottom of nested exception groups: the first that is no mere cancellation."""
    while isinstance(error, BaseExceptionGroup):
        causes = [cause for cause in error.exceptions if not is_stop(cause)]
        error = causes[0] if causes else error.exceptions[0]
    return error


def is_stop(error: BaseException) -> bool:
    """Whether the run was asked to stop, rather than failed."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_stop(cause) for cause in error.exceptions)
    return isinstance(error, _STOPS)


def describe_failure(error: BaseException) -> str:
    """One line for `summary.json` and the terminal: our own errors speak for themselves, others name their type."""
    cause = root_cause(error)
    text = str(cause).splitlines()[0] if str(cause) else ""
    return text if isinstance(cause, MilesError) and text else f"{type(cause).__name__}: {text}".rstrip(": ")
