"""Joins, pauses, installs and audits of engines that follow a real service, in one process."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from controllers.errors import EngineUnreachable
from controllers.events import EngineStateChanged, VersionProven
from miles.weight_sync.agent import PullAgent
from miles.weight_sync.options import WeightSyncOptions
from tests.miles.weight_sync.harness import AgentEngine, publish, quick, rig, same

pytestmark = pytest.mark.real


async def test_no_engine_serves_before_its_proof_and_every_update_is_one_pause(disk: WeightSyncOptions) -> None:
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        await r.serving(await publish(r, 2))
        kinds = (VersionProven, EngineStateChanged)
        seen = [
            type(event).__name__ if isinstance(event, VersionProven) else event.state
            for event in r.events
            if isinstance(event, kinds)
        ]
        assert seen == ["Launching", "Syncing", "VersionProven", "Serving", "Updating", "VersionProven", "Serving"]
        update = ["pause", "call_weight_loader", "set_weight_version", "resume"]
        assert [call[0] for call in r.engine().calls if call[0] != "health"] == ["call_weight_loader", *update, *update]
        assert ("pause", "in_place") in r.engine().calls


@pytest.mark.parametrize("method", ["pause", "set_weight_version", "resume"])
async def test_an_error_in_the_pause_restarts_the_engine_at_the_newest_version(
    method: str, disk: WeightSyncOptions
) -> None:
    """Fails (the engine stays paused) if _install were called outside of `controller.updating`."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        old.refuse(method, EngineUnreachable("cut off", engine="engine-0"))
        newest = await publish(r, 2)
        await r.serving(newest)
        assert r.engine() is not old
        assert not old.alive
        assert r.engine().paused is None
        assert same(r.engine().model, r.ranks.weights)
        assert r.service.statistics().update_failures == 1


async def test_a_failed_install_is_a_vote_and_the_engine_is_not_resumed(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torn live weights must not generate: fails if _install resumed in a `finally`."""
    async with rig(options=disk) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        resumed = old.called("resume")
        copy = PullAgent._copy

        def torn(self: PullAgent, staging: Any) -> None:
            if self.model is not old.model:
                return copy(self, staging)
            self._targets[0].zero_()
            raise RuntimeError("out of memory in mid-copy")

        monkeypatch.setattr(PullAgent, "_copy", torn)
        await r.serving(await publish(r, 2))
        assert r.engine() is not old
        assert old.called("resume") == resumed
        assert same(r.engine().model, r.ranks.weights)


async def test_live_weights_that_are_not_what_was_staged_are_never_admitted(
    disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine claims an install that never happened. Fails if `_audit` is dropped from EngineFollower._join."""
    async with rig(options=disk) as r:
        copy = PullAgent._copy
        liars: list[PullAgent] = []

        def lie_once(self: PullAgent, staging: Any) -> None:
            if not liars:
                liars.append(self)
            else:
                copy(self, staging)

        monkeypatch.setattr(PullAgent, "_copy", lie_once)
        await r.serving(await publish(r, 1))
        lives = r.launcher.lives("engine-0")
        assert len(lives) == 2
        proven = [event.incarnation for event in r.events if isinstance(event, VersionProven)]
        assert proven == [lives[1].incarnation]
        assert same(r.engine().model, r.ranks.weights)


async def test_an_audit_catches_weights_that_went_bad_while_serving(disk: WeightSyncOptions) -> None:
    """Fails if `_audit` is dropped from EngineFollower._update."""
    async with rig(options=quick(transport="disk", folder=disk.folder, audit_every=1)) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        agent_copy = PullAgent._copy
        with pytest.MonkeyPatch.context() as patch:

            def flip(self: PullAgent, staging: Any) -> None:
                agent_copy(self, staging)
                if self.model is old.model:
                    self._targets[3].view(torch.uint8)[0, 0] ^= 1

            patch.setattr(PullAgent, "_copy", flip)
            await publish(r, 2)
            with anyio.fail_after(20):
                assert (await old.wait_exit()).returncode is not None
        await r.serving(2)
        assert same(r.engine().model, r.ranks.weights)


async def test_a_missing_vote_fails_the_engine_and_names_it(disk: WeightSyncOptions) -> None:
    async with rig(options=quick(transport="disk", folder=disk.folder, vote_timeout_s=0.2)) as r:
        await r.serving(await publish(r, 1))
        old = r.engine()
        old.drop_installs = True
        await r.serving(await publish(r, 2))
        failed = [event for event in r.events if isinstance(event, EngineStateChanged) and event.state == "Failed"]
        assert len(failed) == 1
        assert failed[0].incarnation == old.incarnation
        assert "install" in (failed[0].reason or "")
        assert same(r.engine().model, r.ranks.weights)


async def test_at_most_max_updating_engines_pause_at_once(disk: WeightSyncOptions) -> None:
    """Fails if `self._updating` is dropped from EngineFollower._update."""
    async with rig(count=3, options=quick(transport="disk", folder=disk.folder, max_updating=1)) as r:
        await r.serving(await publish(r, 1))
        together: list[int] = []

        def note(*_: object) -> None:
            together.append(sum(each.paused is not None for each in r.launcher.alive()))

        for each in r.launcher.alive():
            each.on_load = note
        await r.serving(await publish(r, 2))
        assert together == [1, 1, 1]


async def test_leaving_in_the_middle_of_a_pause_leaves_no_engine_paused(disk: WeightSyncOptions) -> None:
    """Fails if the pause is not shielded in EngineFollower._install: the update would end without its proof."""
    left = anyio.Event()
    engines: list[AgentEngine] = []
    events: list[Any] = []

    async def session() -> None:
        async with rig(options=disk) as r:
            await r.serving(await publish(r, 1))
            engines.append(r.engine())
            events.append(r.events)
            r.engine().hang("set_weight_version")
            async with r.controller.bus.subscribe("test", kinds=(VersionProven,)) as proofs:
                await publish(r, 2)
                await anext(proofs)
        left.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session)
        with anyio.fail_after(20):
            while not engines or not engines[0].called("set_weight_version") > 1:
                await anyio.wait_all_tasks_blocked()
        assert not left.is_set()
        engine = engines[0]
        assert engine.paused == "in_place"
        engine.release("set_weight_version")
    assert engine.paused is None
    states = [event.state for event in events[0] if isinstance(event, EngineStateChanged)]
    assert "Failed" not in states


@pytest.mark.parametrize("joining", [False, True])
async def test_a_pause_that_hangs_holds_up_no_shutdown_and_its_engine_is_failed(
    joining: bool, disk: WeightSyncOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if _give_up_after_cancellation is dropped: Ctrl-C would wait for twice the vote timeout."""
    monkeypatch.setattr("miles.weight_sync.engine_follower._CANCELLED_PAUSE_S", 0.05)
    with anyio.fail_after(8):
        async with rig(options=disk) as r:
            await anyio.wait_all_tasks_blocked()
            engine, events = r.engine(), r.events
            if not joining:
                await r.serving(await publish(r, 1))
            resumed = engine.called("resume")
            paused = anyio.Event()

            async def pause(mode: str) -> None:
                paused.set()
                await anyio.sleep_forever()

            engine.pause = pause  # type: ignore[method-assign]
            await publish(r, 2)
            await paused.wait()
    failed = [event for event in events if isinstance(event, EngineStateChanged) and event.state == "Failed"]
    assert [event.incarnation for event in failed] == [engine.incarnation]
    assert engine.called("resume") == resumed
