"""The one place where aiohttp's errors become ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import aiohttp

from controllers.errors import EngineRejected, EngineUnreachable

LONGEST_DETAIL = 500


@contextlib.contextmanager
def mapped_errors(url: str, call: str) -> Iterator[None]:
    """Raise EngineUnreachable for whatever keeps an answer from arriving. `call` says what was asked for."""
    try:
        yield
    except TimeoutError as error:  # aiohttp's timeouts derive from it; a caller's own deadline raises further out
        raise EngineUnreachable(f"{url}{call}: no answer in time ({error})", url=url, call=call) from error
    except (aiohttp.ClientError, OSError) as error:
        detail = str(error) or type(error).__name__
        raise EngineUnreachable(f"{url}{call}: {detail}", url=url, call=call) from error


async def refusal(url: str, call: str, response: aiohttp.ClientResponse) -> EngineRejected:
    """The error for an answer of status 400 or above, with what the server says about it."""
    with mapped_errors(url, call):
        detail = (await response.text(errors="replace"))[:LONGEST_DETAIL]
    return EngineRejected(
        f"{url}{call} refused with status {response.status}: {detail}", url=url, call=call, status=response.status
    )
