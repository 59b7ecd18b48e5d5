from __future__ import annotations

import anyio
import pytest

from controllers.errors import SubscriberOverflow
from controllers.event_bus import EventBus
from controllers.events import Event, StaleMessageDropped, VersionPublished
from tests.controllers.harness import version
from tests.support.virtual_time import virtual_time


def published(number: int) -> VersionPublished:
    return VersionPublished(version(number))


@virtual_time
async def test_a_subscription_hears_what_is_published_while_it_is_entered_in_order() -> None:
    bus = EventBus()
    subscription = bus.subscribe("one", buffer=8)
    bus.publish(published(1))
    async with subscription as events:
        for number in (2, 3):
            bus.publish(published(number))
        bus.close()
        assert [event async for event in events] == [published(2), published(3)]
    assert bus.statistics().published == 3
    assert bus.statistics().subscriptions == ()


@virtual_time
async def test_a_waiting_subscriber_is_woken() -> None:
    bus = EventBus()
    heard: list[Event] = []

    async def listen() -> None:
        async with bus.subscribe("one") as events:
            async for event in events:
                heard.append(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        bus.publish(published(1))
        await anyio.wait_all_tasks_blocked()
        assert heard == [published(1)]
        bus.close()


@virtual_time
async def test_overflow_ends_the_subscription_at_the_gap_with_its_name_and_spares_the_others() -> None:
    """Guards `_overflowed` in Subscription._offer: dropping the event instead would lose it silently."""
    bus = EventBus()
    async with bus.subscribe("slow", buffer=2) as slow, bus.subscribe("roomy", buffer=8) as roomy:
        for number in (1, 2, 3, 4):
            bus.publish(published(number))
        assert [await anext(slow), await anext(slow)] == [published(1), published(2)]
        with pytest.raises(SubscriberOverflow, match="'slow'") as caught:
            await anext(slow)
        assert caught.value.subscriber == "slow"
        assert [await anext(roomy) for _ in range(4)] == [published(number) for number in (1, 2, 3, 4)]
        assert [each.overflowed for each in bus.statistics().subscriptions] == [True, False]


@virtual_time
async def test_kinds_keep_other_events_out_of_the_buffer() -> None:
    bus = EventBus()
    async with bus.subscribe("versions", buffer=1, kinds=(VersionPublished,)) as events:
        for _ in range(5):
            bus.publish(StaleMessageDropped("engine-0", "e0-0001-ab12", "x"))
        bus.publish(published(1))
        assert await anext(events) == published(1)


@virtual_time
async def test_entering_a_closed_bus_ends_at_once() -> None:
    bus = EventBus()
    bus.close()
    async with bus.subscribe("late") as events:
        assert [event async for event in events] == []


def test_sinks_get_the_time_and_every_event_inside_publish() -> None:
    bus = EventBus(clock=lambda: 12.5)
    heard: list[tuple[float, Event]] = []
    bus.add_sink(lambda now, event: heard.append((now, event)))
    bus.publish(published(1))
    assert heard == [(12.5, published(1))]


def test_events_published_by_a_sink_come_after_the_one_it_heard_for_everybody() -> None:
    """Guards `_backlog` in EventBus.publish: delivering at once would turn the order around for later sinks."""
    bus = EventBus()
    heard: list[Event] = []

    def answer(_now: float, event: Event) -> None:
        if event == published(1):
            bus.publish(published(2))

    bus.add_sink(answer)
    bus.add_sink(lambda _now, event: heard.append(event))
    bus.publish(published(1))
    assert heard == [published(1), published(2)]


@virtual_time
async def test_a_failing_sink_never_breaks_publish_and_its_error_is_not_lost() -> None:
    """Guards `_sink_failed` in EventBus._deliver."""
    bus = EventBus()
    heard: list[Event] = []

    def full_disk(_now: float, _event: Event) -> None:
        raise OSError("no space left")

    bus.add_sink(full_disk)
    bus.add_sink(lambda _now, event: heard.append(event))
    bus.publish(published(1))
    bus.publish(published(2))
    assert heard == [published(1), published(2)]
    with anyio.fail_after(1), pytest.raises(OSError, match="no space left"):
        await bus.watch_sinks()
