from __future__ import annotations

import anyio
import pytest

from controllers.errors import ConfigError, EngineRejected, MilesError
from controllers.events import EngineUnhealthy, Event, ProbeFailed
from controllers.health import HealthOptions, HealthProbe
from controllers.ports import EngineHealth, LaunchSpec
from tests.controllers.harness import running
from tests.fakes.engine import FakeEngine
from tests.support.virtual_time import virtual_time

OPTIONS = HealthOptions(interval_s=2, timeout_s=5, failures=5, startup_grace_s=60)
NO_GRACE = HealthOptions(interval_s=2, timeout_s=5, failures=3, startup_grace_s=0)


def refusal(**ids: object) -> MilesError:
    return EngineRejected("503 Service Unavailable", status=503, **ids)


def fake() -> FakeEngine:
    return FakeEngine(LaunchSpec("engine-0", "e0-0001-ab12", "e0-0001-ab12:none"))


async def probe(
    engine: FakeEngine, options: HealthOptions, *, for_s: float, tokens: list[int] | None = None
) -> tuple[str | None, list[Event]]:
    events: list[Event] = []
    seen = tokens if tokens is not None else [0]
    with anyio.move_on_after(for_s):
        return await HealthProbe(engine, options, events.append, lambda: seen[0]).run(), events
    return None, events


@virtual_time
async def test_o20_an_engine_that_refuses_probes_for_a_minute_while_it_warms_up_is_not_killed() -> None:
    """Guards `grace_ends` in HealthProbe.run."""
    engine = fake()
    engine.health_script.extend([refusal()] * 29)  # a probe every 2 s: until 58 s
    verdict, events = await probe(engine, OPTIONS, for_s=600)
    assert verdict is None
    assert len(events) == 29
    assert {event.consecutive for event in events if isinstance(event, ProbeFailed)} == {0}


@virtual_time
async def test_o20_one_probe_that_takes_20_s_under_load_is_not_death() -> None:
    engine = fake()
    engine.health_script.extend([EngineHealth(0, 0, "x")] * 40)
    engine.health_script.append(20.0)
    verdict, events = await probe(engine, OPTIONS, for_s=600)
    assert verdict is None
    assert [event.detail for event in events if isinstance(event, ProbeFailed)] == ["no answer within 5 s"]


@virtual_time
async def test_failures_are_counted_in_a_row_only() -> None:
    """Guards `consecutive = 0` after a good answer."""
    engine = fake()
    for _ in range(10):
        engine.health_script.extend([refusal(), refusal(), EngineHealth(0, 0, "x")])
    verdict, events = await probe(engine, NO_GRACE, for_s=200)
    assert verdict is None
    assert len(events) == 20


@virtual_time
async def test_enough_failures_in_a_row_are_reported_once_with_the_last_detail() -> None:
    engine = fake()
    engine.hang("health")
    verdict, events = await probe(engine, NO_GRACE, for_s=600)
    assert anyio.current_time() == pytest.approx(3 * (2 + 5))
    assert [event.consecutive for event in events if isinstance(event, ProbeFailed)] == [1, 2, 3]
    assert isinstance(events[-1], EngineUnhealthy)
    assert verdict == events[-1].detail
    assert "no answer within 5 s" in verdict


@virtual_time
async def test_o20_tokens_seen_by_lease_holders_count_as_alive() -> None:
    """Guards `progressed` in HealthProbe.run: a busy engine goes on for as long as it generates."""
    engine, tokens = fake(), [0]
    engine.hang("health")

    async def generate() -> None:
        for _ in range(100):
            await anyio.sleep(3)
            tokens[0] += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        verdict, _ = await probe(engine, NO_GRACE, for_s=600, tokens=tokens)
    assert verdict is not None
    assert anyio.current_time() > 300


@virtual_time
async def test_a_refusal_that_carries_a_rising_token_count_counts_as_alive() -> None:
    engine = fake()
    engine.health_script.extend(refusal(tokens_generated=10 * n) for n in range(1, 50))
    verdict, _ = await probe(engine, NO_GRACE, for_s=99)
    assert verdict is None
    engine.health_script.extend([refusal(tokens_generated=500)] * 9)
    verdict, _ = await probe(engine, NO_GRACE, for_s=99)
    assert verdict is not None


@virtual_time
async def test_an_unhealthy_engine_is_stopped_and_replaced() -> None:
    async with running(1, health=NO_GRACE, restart_backoff_s=1) as world:
        first = world.engine()
        first.hang("health")
        await world.until_state("Failed")
        await world.until_state("Serving")
        assert first.called("stop") == 1
        assert world.engine() is not first
        assert len(world.log.of(EngineUnhealthy)) == 1


@virtual_time
async def test_tokens_noted_on_a_lease_keep_a_busy_engine_alive() -> None:
    """Guards the `life.tokens` given to HealthProbe by the supervisor, and Lease.note_tokens."""
    async with running(1, health=NO_GRACE) as world:
        world.engine().hang("health")
        async with world.controller.lease(timeout_s=1) as lease:
            for _ in range(60):
                await anyio.sleep(3)
                lease.note_tokens(4)
            assert world.now().state == "Serving"
        await world.until_state("Failed")


@pytest.mark.parametrize("bad", [{"interval_s": 0}, {"timeout_s": -1.0}, {"failures": 0}])
def test_bad_options_name_the_key(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        HealthOptions(**bad)  # type: ignore[arg-type]
