"""The scorer in this process: rewards, and abstentions counted by reason. Worker processes: test_worker_process."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from executors.trajectory import Prompt
from miles.rewards.reward import Place, Reward, RewardFunction, load_reward
from miles.rewards.scorer import Scorer, ScorerOptions
from tests.fakes.byte_encoder import ByteEncoder
from tests.miles.rewards import reward_functions

FUNCTIONS = reward_functions.__name__


def _prompt(label: str, text: str = "p") -> Prompt:
    return Prompt(0, tuple(text.encode()), label, text)


async def test_the_end_of_sequence_is_no_part_of_the_response() -> None:
    async with Scorer(load_reward("exact_match"), ByteEncoder()) as scorer:
        assert await scorer.score(_prompt("1234"), (*b"1234", 257)) == 1.0
        assert await scorer.score(_prompt("1234"), (*b"1243", 257)) == 0.0
        assert await scorer.score(_prompt(""), (*b"1243", 257)) is None
    assert scorer.statistics().scored == 2
    assert scorer.statistics().abstained == {"abstained": 1}


@pytest.mark.parametrize(
    ("response", "reason", "detail"),
    [
        ("none", "abstained", None),
        ("nan", "not_finite", None),
        ("inf", "not_finite", None),
        ("text", "error", "returned str, not a number"),
        ("raise", "error", "ValueError: no idea"),
    ],
)
async def test_a_failing_verifier_abstains_with_a_reason(response: str, reason: str, detail: str | None) -> None:
    """O02, O03: never a quiet 0. Fails when `judge` or the handlers of `Scorer._verdict` give a number instead."""
    reward = Reward("by_response", reward_functions.by_response, Place.INLINE)
    async with Scorer(reward, ByteEncoder()) as scorer:
        with capture_logs() as logs:
            assert await scorer.score(_prompt("l"), tuple(response.encode())) is None
        assert scorer.statistics().abstained == {reason: 1}
        (entry,) = logs
        assert (entry["event"], entry["reason"], entry["detail"]) == ("reward_abstained", reason, detail)
        assert await scorer.score(_prompt("l"), tuple(b"true")) == 1.0
        assert scorer.statistics().scored == 1


async def test_a_reward_that_always_fails_does_not_flood_the_log() -> None:
    async with Scorer(load_reward("exact_match"), ByteEncoder()) as scorer:
        with capture_logs() as logs:
            for _ in range(100):
                await scorer.score(_prompt(""), ())
    assert [entry["count"] for entry in logs] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("function", "reward", "abstained"),
    [
        (reward_functions.awaited, 0.5, {}),
        (reward_functions.awaited_for_ever, None, {"timeout": 1}),
    ],
)
async def test_coroutine_functions_are_awaited_up_to_the_deadline(
    function: RewardFunction, reward: float | None, abstained: dict[str, int]
) -> None:
    """Fails by the test's own time limit when `_await_in_loop` has no deadline."""
    found = load_reward(f"{FUNCTIONS}:{function.__name__}")
    async with Scorer(found, ByteEncoder(), ScorerOptions(timeout_s=0.02)) as scorer:
        assert await scorer.score(_prompt("l"), ()) == reward
    assert scorer.statistics().abstained == abstained
