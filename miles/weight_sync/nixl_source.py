"""The end of the `rdt` transport in a trainer rank: slots and header registered once, and a thread that pumps.

A source must make progress or its readers hang, so one thread owns the agent and drains notifications: every 2 ms
while somebody reads or a version is fresh, else every 25 ms (some microseconds of CPU each).
"""

from __future__ import annotations

import atexit
import base64
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any

from miles.weight_sync.arena import SlotArena
from miles.weight_sync.messages import Endpoint
from miles.weight_sync.nixl_link import LinkError, link_errors, open_agent
from miles.weight_sync.publisher import Closable

ACTIVE_TICK_S = 0.002
IDLE_TICK_S = 0.025
ACTIVE_FOR_S = 1.0
OPEN_TIMEOUT_S = 60.0


class NixlSource(Closable):
    """Serves an arena to readers. `endpoint` is what they need to know."""

    def __init__(self, arena: SlotArena) -> None:
        self._arena = arena
        self._wake = threading.Event()
        self._closing = False
        self._active_until = time.monotonic() + ACTIVE_FOR_S
        opened: Future[Endpoint] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="miles-nixl-source", daemon=True)
        self._thread.start()
        self.endpoint = opened.result(OPEN_TIMEOUT_S)
        atexit.register(self.close)

    def staged(self) -> None:
        """Pump fast for a while: readers are about to come."""
        self._active_until = time.monotonic() + ACTIVE_FOR_S
        self._wake.set()

    def close(self) -> None:
        """Deregister and end the thread. Readers find the peer gone."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        self._thread.join(5.0)

    def _run(self, opened: Future[Endpoint]) -> None:
        try:
            agent, registered = self._open(opened)
        except Exception as error:  # noqa: BLE001 - handed to the constructor, which raises it
            opened.set_exception(error)
            return
        while not self._closing:
            try:
                with link_errors("poll"):
                    if agent.get_new_notifs():
                        self._active_until = time.monotonic() + ACTIVE_FOR_S
            except LinkError:
                self._active_until = 0.0  # a reader that died in mid-conversation; the others go on
            active = time.monotonic() < self._active_until
            self._wake.wait(ACTIVE_TICK_S if active else IDLE_TICK_S)
            self._wake.clear()
        for descriptors in registered:
            with link_errors("deregister"):
                agent.deregister_memory(descriptors)

    def _open(self, opened: Future[Endpoint]) -> tuple[Any, list[Any]]:
        arena = self._arena
        layout = arena.layout
        agent = open_agent(f"trainer-{layout.rank}-{uuid.uuid4().hex}")
        with link_errors("register the slots"):
            registered = [agent.register_memory([arena.memory]), agent.register_memory([arena.header])]
        opened.set_result(
            Endpoint(
                agent=agent.name,
                metadata=base64.b64encode(agent.get_agent_metadata()).decode(),
                slots=tuple(arena.slot_address(index) for index in range(layout.n_slots)),
                header_address=arena.header.data_ptr(),
                header_bytes=arena.header.nbytes,
                memory="VRAM" if arena.device.type == "cuda" else "DRAM",
                device=arena.device.index or 0,
                incarnation=arena.incarnation,
            )
        )
        return agent, registered
