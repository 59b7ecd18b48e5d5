"""NIXL, reached in one place: agents made the one way that is safe here, and its errors told apart from ours.

An agent belongs to one thread for life. The progress thread stays off: it burns half a core, also when idle. NIXL
reports failures as exceptions of its own as well as by states, so both become LinkError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LinkError(Exception):
    """NIXL refused, or the peer is gone. `disconnected` when it is known that the peer is dead."""

    def __init__(self, message: str, disconnected: bool = False) -> None:
        super().__init__(message)
        self.disconnected = disconnected


def open_agent(name: str) -> Any:
    """A NIXL agent with UCX and no progress thread. Whoever made it must poll it."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise LinkError(f"NIXL cannot be imported: {error}") from error
    with link_errors("create an agent"):
        return nixl_agent(name, nixl_agent_config(backends=["UCX"], enable_prog_thread=False))


@contextmanager
def link_errors(doing: str) -> Iterator[None]:
    """Turn NIXL's own exceptions into LinkError; let all others pass."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("nixl"):
            raise
        name = type(error).__name__
        raise LinkError(f"{doing}: {name}: {error}", disconnected="Disconnect" in name) from error
