"""A session: a step is done when every rank has voted it, and what is missing is named."""

from __future__ import annotations

import anyio
import pytest

from controllers.errors import StaleIncarnation, WaitTimeout, WeightSyncError
from controllers.weight_versions import WeightVersion
from miles.weight_sync.messages import AnyVote, Failed, Installed, PullFailed, Ready, Staged
from miles.weight_sync.session import EngineSession


def version(number: int) -> WeightVersion:
    return WeightVersion(number, number, 1, f"{number:016x}")


def staged(rank: int, number: int, digest: str | None = None) -> Staged:
    digest = version(number).digest if digest is None else digest
    return Staged(incarnation="i", rank=rank, version=number, digest=digest, lease="l", nbytes=1, pull_s=0.0)


def installed(rank: int, number: int) -> Installed:
    return Installed(incarnation="i", rank=rank, version=number, digest=version(number).digest, install_s=0.0)


def session(*votes: AnyVote, ranks: int = 2) -> EngineSession:
    made = EngineSession("engine-0", "i", ranks)
    made.granted = {number: version(number) for number in range(1, 9)}
    for vote in votes:
        made.vote(vote)
    return made


async def test_a_missing_rank_is_named() -> None:
    """Fails if one rank's vote were enough."""
    s = session(Ready(incarnation="i", rank=0))
    with pytest.raises(WaitTimeout, match=r"i: waited 0.01 s for ranks \[1\] to start") as caught:
        await s.all_ready(0.01)
    assert caught.value.ranks == (1,)
    assert caught.value.engine == "engine-0"


async def test_all_votes_end_the_wait() -> None:
    s = session(installed(0, 3))

    async def late() -> None:
        await anyio.wait_all_tasks_blocked()
        s.vote(installed(1, 3))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        assert [vote.rank for vote in await s.all_installed(version(3), 5.0)] == [0, 1]


async def test_a_vote_for_another_version_does_not_count() -> None:
    s = session(installed(0, 3), installed(1, 2))
    with pytest.raises(WaitTimeout, match=r"ranks \[1\] to install version 3"):
        await s.all_installed(version(3), 0.01)


async def test_another_digest_is_refused() -> None:
    """Fails if `_agrees` is dropped."""
    s = session(staged(0, 3), staged(1, 3, "f" * 16))
    with pytest.raises(WeightSyncError, match="rank 1 has weights with digest ffff"):
        await s.all_staged(1.0)


async def test_ranks_that_staged_different_versions_meet_at_the_newest() -> None:
    s = session(staged(0, 3), staged(1, 4))

    async def follow() -> None:
        await anyio.wait_all_tasks_blocked()
        assert s.pulling == {0}
        s.vote(staged(0, 4))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        assert await s.all_staged(5.0) == version(4)


async def test_a_version_that_is_staged_already_is_not_pulled_again() -> None:
    s = session(staged(0, 3), staged(1, 4))
    s.request_pull(version(4))
    assert s.pulling == {0}
    s.request_pull(version(5))
    assert s.pulling == {0, 1}


async def test_failures_end_every_wait() -> None:
    failed = session(Failed(incarnation="i", rank=1, reason="no memory"))
    with pytest.raises(WeightSyncError, match="rank 1: no memory"):
        await failed.all_installed(version(1), 5.0)
    stranger = session(Ready(incarnation="i", rank=7))
    with pytest.raises(WeightSyncError, match="rank 7 voted, but the engine has 2 ranks"):
        await stranger.all_ready(5.0)
    pull = PullFailed(incarnation="i", rank=0, version=3, lease="l", reason="gone")
    assert await session(pull).all_staged(5.0) == pull
    over = session()
    over.end("drained")
    with pytest.raises(StaleIncarnation, match="drained"):
        await over.all_ready(5.0)
