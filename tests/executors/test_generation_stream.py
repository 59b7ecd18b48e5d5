"""Stitching: tokens, logprobs and version spans over several requests."""

from __future__ import annotations

import pytest

from executors.generation_stream import GenerationStream
from executors.sampling_client import LabelSpan, TokenChunk
from executors.trajectory import StopReason, VersionSpan


def make_stream(budget: int = 10) -> GenerationStream:
    stream = GenerationStream((1, 2, 3), budget, stop_token_ids=(9,))
    stream.begin_attempt(4)
    return stream


def chunk(*token_ids: int) -> TokenChunk:
    return TokenChunk(token_ids, tuple(-float(token) for token in token_ids))


def test_labels_partition_the_request() -> None:
    stream = make_stream()
    stream.append(chunk(5, 6, 7, 8))
    assert stream.end_attempt("i0", [LabelSpan("i0:5", 2, 4), LabelSpan("i0:4", 0, 2)])
    stream.begin_attempt(5)
    stream.append(chunk(6, 9))
    assert stream.end_attempt("i1", [LabelSpan("i1:5", 0, 2)])
    trajectory = stream.trajectory(StopReason.STOP)
    assert trajectory.response_ids == (5, 6, 7, 8, 6, 9)
    assert trajectory.logprobs == (-5.0, -6.0, -7.0, -8.0, -6.0, -9.0)
    assert trajectory.spans == (VersionSpan(4, 0, 2, "i0"), VersionSpan(5, 2, 4, "i0"), VersionSpan(5, 4, 6, "i1"))


@pytest.mark.parametrize(
    "labels",
    [[], [LabelSpan("i0:7", 2, 3)], [LabelSpan("i0:7", 0, 9)], [LabelSpan("i0:7", 0, 2), LabelSpan("i0:7", 1, 3)]],
)
def test_spans_cover_the_response_whatever_the_server_says(labels: list[LabelSpan]) -> None:
    stream = make_stream()
    stream.append(chunk(5, 6, 7))
    assert stream.end_attempt("i0", labels)
    trajectory = stream.trajectory(StopReason.LENGTH)
    assert [span.start for span in trajectory.spans][1:] == [span.end for span in trajectory.spans][:-1]
    covered = {(span.start, span.end) for span in labels}
    for span in trajectory.spans:
        assert span.version == 7 or not any(start <= span.start < end for start, end in covered)


@pytest.mark.parametrize("label", ["i1:4", "i0:none", "i0", "default", "i0:", ":4", "x:i0:4"])
def test_a_label_that_is_not_the_leases_drops_the_request(label: str) -> None:
    stream = make_stream()
    stream.append(chunk(5))
    assert stream.end_attempt("i0", [LabelSpan("i0:4", 0, 1)])
    stream.begin_attempt(4)
    stream.append(chunk(6, 7))
    assert not stream.end_attempt("i0", [LabelSpan(label, 0, 2)])
    assert (stream.token_ids, stream.logprobs) == ([5], [-5.0])
    assert stream.remaining == 9


def test_requests_to_one_engine_and_version_make_one_span() -> None:
    stream = make_stream()
    for _ in range(2):
        stream.begin_attempt(4)
        stream.append(chunk(5, 6))
        assert stream.end_attempt("i0", [LabelSpan("i0:4", 0, 2)])
    assert stream.spans == [VersionSpan(4, 0, 4, "i0")]


def test_incarnations_may_hold_colons() -> None:
    stream = make_stream()
    stream.append(chunk(5))
    assert stream.end_attempt("a:b", [LabelSpan("a:b:4", 0, 1)])


def test_tokens_beyond_the_budget_are_cut() -> None:
    stream = make_stream(budget=3)
    stream.append(chunk(5, 6, 7, 8))
    assert stream.end_attempt("i0", [LabelSpan("i0:4", 0, 4)])
    assert stream.stop_reason() is StopReason.LENGTH
    assert stream.trajectory(StopReason.LENGTH).response_ids == (5, 6, 7)


def test_unequal_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        make_stream().append(TokenChunk((1, 2), (0.0,)))


def test_oldest_version_counts_tokens_still_arriving() -> None:
    stream = make_stream()
    assert stream.oldest_version is None
    stream.append(chunk(5))
    assert stream.oldest_version == 4
    stream.end_attempt("i0", [LabelSpan("i0:6", 0, 1)])
    assert stream.oldest_version == 6
