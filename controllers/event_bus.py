"""Fan-out of controller events. `publish` is synchronous, so an event is on its way before anybody can act on it.

Overflow policy: no event is ever lost silently. A *subscription* has a bounded buffer; one that falls behind gets
what was buffered and then SubscriberOverflow, which names it. A *sink* is called inside `publish` and misses nothing.
A sink that raises is taken off; its error comes out of `watch_sinks` (the controller runs it), never out of
`publish`, because a state change must not stop half-way.
Order: every receiver sees events in the order of publication, also those a sink publishes from inside its call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import anyio
import structlog

from controllers.errors import SubscriberOverflow
from controllers.events import Event

Sink = Callable[[float, Event], None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """One subscription: `buffered` of at most `buffer` events wait for it."""

    name: str
    buffer: int
    buffered: int
    delivered: int
    overflowed: bool


@dataclass(frozen=True, slots=True)
class BusStatistics:
    """Events published since the start, and who listens."""

    published: int
    sinks: int
    subscriptions: tuple[SubscriptionStatistics, ...]


class Subscription:
    """An iterator over the events published while it is entered. Ends when the bus is closed."""

    def __init__(self, bus: EventBus, name: str, buffer: int, kinds: tuple[type[Event], ...]) -> None:
        self.name = name
        self.buffer = buffer
        self._bus = bus
        self._kinds = kinds
        self._events: deque[Event] = deque()
        self._wake = anyio.Event()
        self._delivered = 0
        self._overflowed = False
        self._ended = False

    async def __aenter__(self) -> Subscription:
        self._bus._enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bus._leave(self)
        self._end()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises SubscriberOverflow at the first event that did not fit the buffer."""
        while not self._events:
            if self._overflowed:
                raise SubscriberOverflow(
                    f"event subscriber {self.name!r} fell more than {self.buffer} events behind and was closed",
                    subscriber=self.name,
                    buffer=self.buffer,
                )
            if self._ended:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        self._delivered += 1
        return self._events.popleft()

    def statistics(self) -> SubscriptionStatistics:
        return SubscriptionStatistics(
            self.name, self.buffer, len(self._events), self._delivered, overflowed=self._overflowed
        )

    def _offer(self, event: Event) -> None:
        if self._overflowed or not isinstance(event, self._kinds):
            return
        if len(self._events) >= self.buffer:
            self._overflowed = True
            _log.error("event subscriber overflowed", subscriber=self.name, buffer=self.buffer, lost=event)
        else:
            self._events.append(event)
        self._wake.set()

    def _end(self) -> None:
        self._ended = True
        self._wake.set()


class EventBus:
    """Bounded fan-out of events. `clock` stamps what sinks get (seconds since the epoch)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sinks: list[Sink] = []
        self._subscriptions: list[Subscription] = []
        self._backlog: deque[tuple[float, Event]] = deque()
        self._delivering = False
        self._published = 0
        self._closed = False
        self._sink_error: Exception | None = None
        self._sink_failed = anyio.Event()

    def publish(self, event: Event) -> None:
        """Hand `event` to every sink and subscription. Never blocks and never raises."""
        self._published += 1
        self._backlog.append((self._clock(), event))
        if self._delivering:  # published by a sink, from inside its call: after the event being delivered now
            return
        self._delivering = True
        try:
            while self._backlog:
                self._deliver(*self._backlog.popleft())
        finally:
            self._delivering = False

    def add_sink(self, sink: Sink) -> None:
        """Call `sink(time, event)` inside every publish from now on."""
        self._sinks.append(sink)

    def subscribe(
        self, name: str, *, buffer: int = 1024, kinds: tuple[type[Event], ...] = (Event,)
    ) -> Subscription:
        """A subscription to events of `kinds`; it hears events published after `async with` has entered it."""
        return Subscription(self, name, buffer, kinds)

    async def watch_sinks(self) -> None:
        """Wait until a sink fails, then raise its error."""
        await self._sink_failed.wait()
        self.raise_sink_error()

    def raise_sink_error(self) -> None:
        """Raise the error of a sink that failed; return if none did."""
        if self._sink_error is not None:
            raise self._sink_error

    def close(self) -> None:
        """End every subscription after what it has buffered. Sinks go on hearing events."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription._end()

    def statistics(self) -> BusStatistics:
        return BusStatistics(
            self._published, len(self._sinks), tuple(each.statistics() for each in self._subscriptions)
        )

    def _deliver(self, now: float, event: Event) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(now, event)
            except Exception as error:  # noqa: BLE001 - foreign code; recorded here, raised by watch_sinks
                _log.error("event sink failed", sink=repr(sink), lost=event, exc_info=error)
                self._sinks.remove(sink)
                self._sink_error = self._sink_error or error
                self._sink_failed.set()
        for subscription in tuple(self._subscriptions):
            subscription._offer(event)

    def _enter(self, subscription: Subscription) -> None:
        if self._closed:
            subscription._end()
        self._subscriptions.append(subscription)

    def _leave(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)
