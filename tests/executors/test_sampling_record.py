"""Kept tokens and routed experts stay aligned with the tokens over several requests and engines."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from executors.generation_stream import GenerationStream
from executors.sampling_client import LabelSpan, TokenChunk
from executors.sampling_record import KeptTokens, Routing, RoutingReport
from executors.trajectory import StopReason, Trajectory, VersionSpan

WIDTH = 2
PROMPT = (1, 2, 3)


def make_stream() -> GenerationStream:
    return GenerationStream(PROMPT, 10, stop_token_ids=(9,))


def report(engine: int, start: int, rows: int) -> RoutingReport:
    """Expert 0 of a token tells its position, expert 1 the engine."""
    experts = [value for position in range(start, start + rows) for value in (position, engine)]
    return RoutingReport(start, rows, array("h", experts).tobytes())


def attempt(
    stream: GenerationStream,
    engine: int,
    tokens: Sequence[int],
    *,
    routing: RoutingReport | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    label: str | None = None,
) -> None:
    stream.begin_attempt(4)
    logprobs = tuple(-1.0 for _ in tokens)
    stream.append(TokenChunk(tuple(tokens), logprobs, finish="abort", kept=kept, routing=routing))
    stream.end_attempt(f"i{engine}", [LabelSpan(label or f"i{engine}:4", 0, len(tokens))])


def rows_of(trajectory: Trajectory) -> list[tuple[int, ...]]:
    assert trajectory.routing is not None
    flat = array("h", trajectory.routing.experts)
    return [tuple(flat[i : i + WIDTH]) for i in range(0, len(flat), WIDTH)]


def test_each_token_has_the_experts_of_the_engine_that_sampled_the_next() -> None:
    """Fails when the second answer, which covers the whole prefix again, overwrites what the first engine told."""
    stream = make_stream()
    assert stream.routing_from() == 0
    attempt(stream, 0, (5, 6), routing=report(0, 0, 4))
    assert stream.routing_from() == 4
    attempt(stream, 1, (7, 9), routing=report(1, 0, 6))
    assert rows_of(stream.trajectory(StopReason.STOP)) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


def test_a_continuation_that_tells_only_what_is_new() -> None:
    stream = make_stream()
    attempt(stream, 0, (5, 6), routing=report(0, 0, 4))
    attempt(stream, 1, (7, 9), routing=report(1, stream.routing_from(), 2))
    assert rows_of(stream.trajectory(StopReason.STOP)) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


def test_tokens_whose_engine_told_nothing_have_no_record() -> None:
    """Fails when a later engine's prefill is taken for what sampled the tokens of an engine that died."""
    stream = make_stream()
    attempt(stream, 0, (5, 6))
    assert stream.routing_from() == 0
    attempt(stream, 1, (7, 9), routing=report(1, 0, 6))
    expected = [(0, 1), (1, 1), (-1, -1), (-1, -1), (4, 1), (5, 1)]
    assert rows_of(stream.trajectory(StopReason.STOP)) == expected
    stream = make_stream()
    attempt(stream, 0, (5, 6), routing=report(0, 0, 4))
    attempt(stream, 1, (7, 9))
    assert rows_of(stream.trajectory(StopReason.STOP))[4:] == [(-1, -1)] * 2


def test_what_was_dropped_or_begun_again_leaves_no_record() -> None:
    stream = make_stream()
    attempt(stream, 0, (5, 6), routing=report(0, 0, 4), kept=[[5], [6, 7]], label="i9:4")
    assert stream.token_ids == [] and stream.routing_from() == 0
    attempt(stream, 0, (5, 6), routing=report(0, 0, 4), kept=[[5], [6, 7]])
    stream.restart()
    attempt(stream, 1, (9,), routing=report(1, 0, 3), kept=[[9, 8]])
    trajectory = stream.trajectory(StopReason.STOP)
    assert rows_of(trajectory) == [(0, 1), (1, 1), (2, 1)]
    assert trajectory.kept == KeptTokens(array("i", [2]).tobytes(), array("i", [9, 8]).tobytes())


def test_kept_tokens_over_requests_some_of_which_tell_none() -> None:
    stream = make_stream()
    attempt(stream, 0, (5, 6), kept=[[5, 1], [6]])
    attempt(stream, 1, (7,))
    attempt(stream, 0, (9,), kept=[[9, 2, 3]])
    kept = stream.trajectory(StopReason.STOP).kept
    assert kept is not None and len(kept) == 4
    assert array("i", kept.counts).tolist() == [2, 1, 0, 3]
    assert array("i", kept.ids).tolist() == [5, 1, 6, 9, 2, 3]


def test_nothing_told_is_no_record() -> None:
    stream = make_stream()
    attempt(stream, 0, (5, 9))
    trajectory = stream.trajectory(StopReason.STOP)
    assert trajectory.kept is None and trajectory.routing is None


@pytest.mark.parametrize(
    "broken",
    [RoutingReport(0, 4, b"\0" * 15), RoutingReport(0, 4, b""), report(0, 0, 4)],
    ids=["ragged", "empty", "wide"],
)
def test_a_report_that_does_not_fit_is_refused(broken: RoutingReport) -> None:
    stream = make_stream()
    attempt(stream, 0, (5,), routing=RoutingReport(0, 3, b"\0" * 6))
    with pytest.raises(ValueError, match="routing of"):
        attempt(stream, 0, (6, 7), routing=broken)


def test_records_that_do_not_fit_their_trajectory_are_refused() -> None:
    spans = (VersionSpan(1, 0, 1, "i"),)
    with pytest.raises(ValueError, match="routing"):
        Trajectory((1, 2), (3,), (0.0,), spans, StopReason.STOP, routing=Routing(b"\0" * 4, 2))
    with pytest.raises(ValueError, match="kept"):
        Trajectory((1, 2), (3,), (0.0,), spans, StopReason.STOP, kept=KeptTokens(b"", b""))
    with pytest.raises(ValueError, match="counts"):
        KeptTokens(array("i", [2]).tobytes(), b"\0" * 4)
