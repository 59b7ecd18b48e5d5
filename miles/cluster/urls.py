"""URLs of servers, with the brackets that IPv6 addresses need exactly once."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_url(host: str, port: int, scheme: str = "http") -> str:
    """`http://127.0.0.1:8000`, `tcp://[fd00::1]:8000`; a host that comes in brackets keeps its one pair."""
    bare = host.removeprefix("[").removesuffix("]")
    return f"{scheme}://[{bare}]:{port}" if ":" in bare else f"{scheme}://{bare}:{port}"


def split_url(url: str) -> tuple[str, int]:
    """The host (no brackets) and port of what `host_url` made. Raises ValueError where one is missing."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url!r} does not name a host and a port")
    return parts.hostname, parts.port
