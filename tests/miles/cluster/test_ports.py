from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from controllers.errors import PortTaken
from miles.cluster.ports import reserve_port


def test_eight_reservations_at_once_never_collide() -> None:
    with ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        reservations = list(pool.map(lambda _: reserve_port("127.0.0.1"), range(8)))
        for reservation in reservations:
            stack.enter_context(reservation)
        assert len({reservation.port for reservation in reservations}) == 8


def test_a_port_somebody_listens_on_is_refused_by_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken") as caught:
            reserve_port("127.0.0.1", port)
    assert caught.value.port == port


def test_a_reserved_port_is_refused_until_released() -> None:
    """Fails without the hold: nobody listens on the port yet."""
    with reserve_port("127.0.0.1") as first, pytest.raises(PortTaken):
        reserve_port("127.0.0.1", first.port)
    with reserve_port("127.0.0.1", first.port) as again:
        assert again.port == first.port


def test_ipv6_with_and_without_brackets() -> None:
    with reserve_port("::1") as first, reserve_port("[::1]") as second:
        assert first.port != second.port
