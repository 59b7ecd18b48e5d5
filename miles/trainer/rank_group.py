"""`RankGroup`: the actors of all ranks of one incarnation of a trainer. It works as a whole or is lost as a whole.

Lost is a group with a rank that died, that did not answer by a call's deadline, or that left the others waiting in a
collective. A death is an event also while no call is pending (one call per rank never returns) or while the other
ranks are stuck in a collective. A lost group is never used again. `MegatronTrainer` makes groups, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from controllers.errors import ActorDied, InfrastructureError, MilesError, WaitTimeout
from miles.cluster.actors import ActorOptions, RemoteActor
from miles.trainer.options import TrainerOptions
from miles.trainer.rank import TrainerRank

SETTLE_S = 10.0
"""Once a rank has raised an error of its own, how long the others may take to answer. A rank whose peer died often
fails in their collective before the news of the death is here."""

_WATCH, _SIDE = "watch", "side"


class RankGroup:
    """Made by `start`. Calls come one at a time (those `beside` among themselves), so that collectives start in the
    same order on every rank.

    `on_lost(reason)` is called once, when the group is lost, before any call that waits for it returns.
    """

    def __init__(self, ranks: list[RemoteActor], on_lost: Callable[[MilesError], None]) -> None:
        self._ranks = ranks
        self._on_lost = on_lost
        self._watches = anyio.CancelScope()
        self._news = anyio.Event()
        self.loss: MilesError | None = None
        """Why this group is lost; None while it works."""

    @classmethod
    def start(
        cls,
        options: TrainerOptions,
        name: str,
        start: Callable[..., RemoteActor],
        on_lost: Callable[[MilesError], None],
    ) -> RankGroup:
        """Start the actors of all ranks, called `NAME-RANK`; `open` comes next."""
        group = cls([], on_lost)
        gpus = 1.0 if options.device == "cuda" else 0.0
        try:
            for rank in range(options.world_size):
                placement = ActorOptions(f"{name}-{rank}", num_gpus=gpus, threads={_WATCH: 1, _SIDE: 1})
                group._ranks.append(start(TrainerRank, options, rank, options=placement))
        except BaseException:
            group.end()
            raise
        return group

    def __len__(self) -> int:
        return len(self._ranks)

    async def open(self, timeout_s: float) -> None:
        """Have the ranks meet and load the model. Raises what a rank raised, such as ConfigError."""
        (rendezvous,) = await self._call(self._ranks[:1], "rendezvous", (), timeout_s)
        await self.call("open", rendezvous, timeout_s=timeout_s)

    async def call(self, method: str, *args: Any, timeout_s: float, beside: bool = False) -> list[Any]:
        """Call a method on every rank at once; results in rank order. `beside` others, it runs in the side thread.

        Raises `loss` when the group is or gets lost (ActorDied, or WaitTimeout after `timeout_s`), else the error of
        the lowest rank that raised one. When others have not answered `SETTLE_S` after it, that loses the group too.
        """
        return await self._call(self._ranks, method, args, timeout_s, _SIDE if beside else None)

    async def _call(
        self, ranks: list[RemoteActor], method: str, args: tuple[Any, ...], timeout_s: float, thread: str | None = None
    ) -> list[Any]:
        if self.loss is not None:
            raise self.loss
        results: list[Any] = [None] * len(ranks)
        errors: dict[int, Exception] = {}
        waiting = set(range(len(ranks)))

        async def call_rank(index: int, actor: RemoteActor) -> None:
            try:
                results[index] = await actor.call(method, *args, timeout_s=timeout_s, thread=thread)
            except Exception as error:  # noqa: BLE001 - kept and raised below: the others may wait for this rank
                if isinstance(error, ActorDied | WaitTimeout) or type(error) is InfrastructureError:
                    self.lose(error)
                errors[index] = error
                calls.cancel_scope.deadline = min(calls.cancel_scope.deadline, anyio.current_time() + SETTLE_S)
            waiting.discard(index)
            if not waiting:
                calls.cancel_scope.cancel()

        async with anyio.create_task_group() as calls:
            for index, actor in enumerate(ranks):
                calls.start_soon(call_rank, index, actor)
            await self.lost()
            calls.cancel_scope.cancel()
        if self.loss is None and waiting:
            silent = ", ".join(str(rank) for rank in sorted(waiting))
            self.lose(ActorDied(f"trainer ranks {silent} did not answer {method} after another had failed"))
        elif self.loss is not None:
            raise self.loss
        if errors:
            raise errors[min(errors)]
        return results

    async def watch(self) -> None:
        """Return once the group is lost or ended. Whoever starts it learns of deaths without a call."""

        async def watch_rank(actor: RemoteActor) -> None:
            try:
                await actor.call(_WATCH, thread=_WATCH)
            except InfrastructureError as error:
                self.lose(error)

        with self._watches:
            async with anyio.create_task_group() as watches:
                for actor in self._ranks:
                    watches.start_soon(watch_rank, actor)

    async def lost(self) -> None:
        """Return once the group is lost."""
        await self._news.wait()

    def lose(self, reason: MilesError) -> None:
        """Give the group up: nobody waits for it any more, and its processes are killed. The first reason counts."""
        if self.loss is None:
            self.loss = reason
            self._on_lost(reason)
            self._news.set()
            self.end()

    def end(self) -> None:
        """Kill all ranks' processes. Harmless when they are gone."""
        self._watches.cancel()
        for actor in self._ranks:
            actor.kill()
