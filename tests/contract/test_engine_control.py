"""The contract of controllers.ports.Engine, over the fake and over a real engine: what one does, the other does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from controllers.errors import EngineUnreachable
from controllers.ports import PauseMode
from tests.contract.subjects import FakeSubject, ServerSubject, Subject, own_server, shared_server
from tests.support.embedded_server import LABEL, RunningServer

KINDS = ["fake", pytest.param("embedded", marks=pytest.mark.real)]


@asynccontextmanager
async def _fake() -> AsyncIterator[FakeSubject]:
    yield FakeSubject()


Entered = AbstractAsyncContextManager[Subject]


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Entered:
    """An engine to use, to be entered by the test."""
    if request.param == "fake":
        return _fake()
    return shared_server(request.getfixturevalue("server"), tmp_path / "note")


@pytest.fixture(params=KINDS)
def own_subject(request: pytest.FixtureRequest, tmp_path: Path) -> Entered:
    """An engine to end."""
    return _fake() if request.param == "fake" else own_server(tmp_path)


async def test_health_tells_the_label_and_the_running_requests(subject: Entered) -> None:
    async with subject as it:
        assert (await it.engine.health(5)).weight_version == LABEL
        await it.begin("r" * 16)
        await it.engine.set_weight_version("engine-0.1:3")
        health = await it.engine.health(5)
        assert (health.weight_version, health.running) == ("engine-0.1:3", 1)


async def test_abort_ends_the_named_request_only(subject: Entered) -> None:
    """Fails where an id that begins another one ends both."""
    async with subject as it:
        await it.begin("g1", "g10")
        await it.engine.abort("g1")
        assert await it.live() == {"g10"}
        await it.engine.abort("nobody")
        assert await it.live() == {"g10"}


async def test_abort_all_ends_every_request(subject: Entered) -> None:
    async with subject as it:
        await it.begin("a" * 16, "b" * 16)
        await it.engine.abort_all()
        assert await it.live() == set()


async def test_a_new_label_aborts_nothing(subject: Entered) -> None:
    """O23: fails where `set_weight_version` leaves the server's default, which aborts all."""
    async with subject as it:
        ids = {f"{number:016d}" for number in range(8)}
        await it.begin(*ids)
        await it.engine.pause("in_place")
        await it.engine.set_weight_version("engine-0.1:1")
        await it.engine.resume()
        assert await it.live() == ids


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_keeps_requests_and_resume_can_be_repeated(subject: Entered, mode: PauseMode) -> None:
    async with subject as it:
        await it.begin("a" * 16, "b" * 16)
        await it.engine.pause(mode)
        await it.engine.resume()
        await it.engine.resume()
        assert await it.live() == {"a" * 16, "b" * 16}


async def test_a_pause_that_aborts_ends_every_request(subject: Entered) -> None:
    async with subject as it:
        await it.begin("a" * 16, "b" * 16)
        await it.engine.pause("abort")
        assert await it.live() == set()


async def test_the_weight_loader_gets_the_manifest_byte_for_byte(subject: Entered) -> None:
    async with subject as it:
        manifests = [it.manifest(bytes(range(256))), it.manifest(b"")]
        for manifest in manifests:
            await it.engine.call_weight_loader(it.loader, manifest or b"\0", 20)
        assert it.loaded() == [manifest or b"\0" for manifest in manifests]


async def test_a_crash_is_an_exit_and_ends_every_call(own_subject: Entered) -> None:
    async with own_subject as it:
        leaving = asyncio.create_task(it.engine.wait_exit())
        await asyncio.sleep(0)
        crashed = time.monotonic()
        await it.crash()
        assert (await leaving).returncode == -9
        assert time.monotonic() - crashed < 0.5
        with pytest.raises(EngineUnreachable):
            await it.engine.health(1)
        with pytest.raises(EngineUnreachable):
            await it.engine.pause("in_place")
        await it.engine.stop(1)
        assert (await it.engine.wait_exit()).returncode == -9


async def test_stop_ends_it_once(own_subject: Entered) -> None:
    async with own_subject as it:
        leaving = asyncio.create_task(it.engine.wait_exit())
        await it.engine.stop(10)
        first = await leaving
        await it.engine.stop(10)
        assert await it.engine.wait_exit() == first
        with pytest.raises(EngineUnreachable):
            await it.engine.health(1)


@pytest.mark.real
async def test_health_answers_while_every_slot_is_taken_and_tokens_rise(server: RunningServer, tmp_path: Path) -> None:
    """Fails where a probe queues behind generation."""
    async with shared_server(server, tmp_path / "note") as it:
        assert isinstance(it, ServerSubject)
        await it.begin(*(f"{number:016d}" for number in range(8)))
        before = await it.engine.health(5)
        await it.requests["0" * 16].more(5)
        after = await it.engine.health(5)
        assert before.running == 8 and after.tokens_generated > before.tokens_generated
