"""What an engine says about its sampling beside tokens and logprobs, as compact bytes from the engine to the trainer.

`KeptTokens`: the tokens each response token was drawn from (top-k, top-p). `Routing`: the experts each input token went
to. Their builders gather them over a trajectory's requests, aligned with the tokens received; a part that no engine
told is marked as such, and the trainer then computes it as if nothing had been recorded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

NO_RECORD = b"\xff\xff"
"""One expert of `Routing` that is not known: -1."""
_EXPERT_BYTES = 2


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that sampling kept at each response token, the sampled one among them. Raises ValueError if ragged.

    The behaviour logprob of a token with a kept set is normalised over that set.
    """

    counts: bytes
    """int32 [n]: kept tokens at each response token; 0 where nothing was recorded: then it is the whole vocabulary."""
    ids: bytes
    """int32 [sum(counts)]: token ids, response token after response token."""

    def __post_init__(self) -> None:
        if len(self.counts) % 4 or len(self.ids) != 4 * sum(array("i", self.counts)):
            raise ValueError("kept token ids do not match their counts")

    def __len__(self) -> int:
        """Response tokens."""
        return len(self.counts) // 4

    def sizes(self) -> Sequence[int]:
        """How many tokens were kept at each response token; 0 where nothing was recorded."""
        return array("i", self.counts)


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that the input tokens of a sequence were routed to. Raises ValueError for a broken row.

    Rollout routing replay, R3 (arXiv 2510.11370): the trainer routes each token to these experts again.
    """

    experts: bytes
    """int16 [tokens, layers, top_k], all layers of the model; -1 where nothing was recorded."""
    width: int
    """layers * top_k."""

    def __post_init__(self) -> None:
        if self.width < 1 or len(self.experts) % (_EXPERT_BYTES * self.width):
            raise ValueError(f"routing of {len(self.experts)} bytes is not made of rows of {self.width} experts")

    def __len__(self) -> int:
        """Input tokens: prompt and response without its last token."""
        return len(self.experts) // (_EXPERT_BYTES * self.width)

    def recorded(self) -> int:
        """Input tokens whose experts are known."""
        return sum(first >= 0 for first in array("h", self.experts)[:: self.width])


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What one answer tells: the experts of input tokens [start, start + rows) of its request."""

    start: int
    rows: int
    experts: bytes
    """int16 [rows, layers, top_k]."""


class KeptTokensBuilder:
    """Kept tokens of a response as it is received."""

    __slots__ = ("_counts", "_ids")

    def __init__(self) -> None:
        self._counts, self._ids = array("i"), array("i")

    def extend(self, kept: Sequence[Sequence[int]] | None, count: int) -> None:
        """Take in the kept sets of `count` new tokens, or that there are none."""
        if kept is None:
            self._counts.extend([0] * count)
            return
        for ids in kept[:count]:
            self._counts.append(len(ids))
            self._ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` response tokens."""
        del self._counts[length:]
        del self._ids[sum(self._counts) :]

    def build(self) -> KeptTokens | None:
        """None where no engine told any."""
        return KeptTokens(self._counts.tobytes(), self._ids.tobytes()) if self._ids else None


class RoutingBuilder:
    """Routing of a sequence as its requests end.

    The experts of an input token are those of the engine that sampled the token after it; those of the prompt before
    its last token are the first engine's that told them.
    """

    __slots__ = ("_last_of_prompt", "_prompt_known", "_rows", "_width")

    def __init__(self, prompt_length: int) -> None:
        self._last_of_prompt = prompt_length - 1
        self._rows = bytearray()
        self._width = 0
        self._prompt_known = False

    def wanted_from(self, received: int) -> int:
        """First input token whose experts the next request should tell, `received` response tokens after the prompt."""
        return self._last_of_prompt + received if self._prompt_known else 0

    def check(self, report: RoutingReport) -> None:
        """Raise ValueError for a report that cannot belong to this sequence."""
        size, rows = len(report.experts), report.rows
        width = size // (_EXPERT_BYTES * rows) if rows > 0 else 0
        broken = rows < 0 or size != _EXPERT_BYTES * rows * width
        if broken or (rows and (not width or self._width not in (0, width))):
            raise ValueError(f"routing of {size} bytes for {rows} tokens, and of {self._width} experts a token before")

    def place(self, report: RoutingReport, first: int, end: int) -> None:
        """Take the experts behind response tokens [first, end), which the reporting engine sampled."""
        self.check(report)
        if not report.rows:
            return
        self._width = len(report.experts) // (_EXPERT_BYTES * report.rows)
        if not self._prompt_known:
            self._prompt_known = report.start == 0 and report.rows >= self._last_of_prompt
            self._copy(report, 0, self._last_of_prompt)
        self._copy(report, self._last_of_prompt + first, self._last_of_prompt + end)

    def build(self, response_length: int) -> Routing | None:
        """Routing of the whole sequence; None where no engine told any."""
        if not self._rows or not response_length:
            return None
        self._fill(self._last_of_prompt + response_length)
        return Routing(bytes(self._rows), self._width)

    def _copy(self, report: RoutingReport, first: int, end: int) -> None:
        first, end = max(first, report.start), min(end, report.start + report.rows)
        if first >= end:
            return
        self._fill(end)
        size = self._row_bytes
        self._rows[first * size : end * size] = report.experts[
            (first - report.start) * size : (end - report.start) * size
        ]

    def _fill(self, tokens: int) -> None:
        missing = tokens * self._row_bytes - len(self._rows)
        if missing > 0:
            self._rows += NO_RECORD * (missing // _EXPERT_BYTES)

    @property
    def _row_bytes(self) -> int:
        return _EXPERT_BYTES * self._width

