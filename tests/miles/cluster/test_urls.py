from __future__ import annotations

import pytest

from miles.cluster.urls import host_url, split_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("fd00::1", "http://[fd00::1]:8000"),
        ("[fd00::1]", "http://[fd00::1]:8000"),
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("node-7.cluster", "http://node-7.cluster:8000"),
    ],
)
def test_ipv6_hosts_get_brackets_exactly_once(host: str, url: str) -> None:
    """O22. Fails when `host_url` does not strip brackets, or glues a bare IPv6 address to the port."""
    assert host_url(host, 8000) == url
    assert split_url(url) == (host.strip("[]"), 8000)


def test_the_scheme_can_be_named() -> None:
    assert host_url("fd00::1", 8000, "tcp") == "tcp://[fd00::1]:8000"


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:80"])
def test_a_url_without_host_or_port_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="does not name a host and a port"):
        split_url(url)
