"""What a run's `events.jsonl` says about the fleet over time: a span a state, and how far engines lagged behind.

Times are seconds since the first event. Used by the plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StateSpan:
    """`engine` was in `state` over [start, end)."""

    engine: str
    state: str
    start: float
    end: float


@dataclass(slots=True)
class FleetHistory:
    """Spans in the order of their start; `lag[engine]` holds (time, published minus serving version) at each change.

    A lag of None stands for an engine that serves nothing.
    """

    spans: list[StateSpan] = field(default_factory=list)
    lag: dict[str, list[tuple[float, int | None]]] = field(default_factory=dict)
    restarts: list[tuple[float, float]] = field(default_factory=list)
    origin: float = 0.0
    end: float = 0.0

    @property
    def engines(self) -> list[str]:
        """Names in order."""
        return sorted({span.engine for span in self.spans})


    def mean_lag(self, engine: str, edges: Sequence[float]) -> list[float | None]:
        """The mean lag over the time in each bin [edges[i], edges[i + 1]); None where the engine never served."""
        points = self.lag.get(engine, [])
        sums = [0.0] * (len(edges) - 1)
        served = [0.0] * (len(edges) - 1)
        ends = [time for time, _ in points[1:]] + [self.end]
        first = 0
        for (start, lag), end in zip(points, ends, strict=True):
            while first < len(sums) - 1 and edges[first + 1] <= start:
                first += 1
            index = first
            while lag is not None and index < len(sums) and edges[index] < end:
                overlap = min(end, edges[index + 1]) - max(start, edges[index])
                sums[index] += lag * max(0.0, overlap)
                served[index] += max(0.0, overlap)
                index += 1
        return [total / time if time > 0 else None for total, time in zip(sums, served, strict=True)]


_AVAILABLE = ("Serving", "Updating")


def read_history(events: Iterable[dict[str, Any]]) -> FleetHistory:
    """Replay the lines of `events.jsonl`."""
    history = FleetHistory()
    open_spans: dict[str, tuple[str, float]] = {}
    serving: dict[str, int | None] = {}
    published: int | None = None
    restart_start: float | None = None
    first: float | None = None
    for event in events:
        first = event["time"] if first is None else first
        now = event["time"] - first
        history.end = now
        kind, engine = event["event"], event["engine"]
        if kind == "EngineStateChanged":
            if engine in open_spans:
                state, since = open_spans[engine]
                history.spans.append(StateSpan(engine, state, since, now))
            open_spans[engine] = (event["state"], now)
            if event["state"] not in _AVAILABLE:
                serving[engine] = None
            elif event["state"] == "Serving":
                serving[engine] = event["version"]
        elif kind == "VersionPublished":
            published = event["version"]["number"]
        elif kind == "RollingRestartStarted":
            restart_start = now
        elif kind == "RollingRestartFinished" and restart_start is not None:
            history.restarts.append((restart_start, now))
            restart_start = None
        else:
            continue
        for name, version in serving.items():
            lag = None if version is None or published is None else published - version
            history.lag.setdefault(name, []).append((now, lag))
    history.origin = first or 0.0
    history.spans += [StateSpan(engine, state, since, history.end) for engine, (state, since) in open_spans.items()]
    if restart_start is not None:
        history.restarts.append((restart_start, history.end))
    return history
