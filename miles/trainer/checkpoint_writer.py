"""Writing a checkpoint while training goes on: copied while the ranks stand still, written by a thread of each.

    begin    every rank: plan, copy what this rank will write        training waits for no more than this
    thread   every rank: write -> rank 0: index, flush, rename -> every rank: how it ended
    wait     until then; raises what went wrong, on whichever rank it did

The folder is whole or absent: only a rename makes it. Threads talk over a gloo group of their own, so that their
collectives cannot meet those of training. No process is forked: a rank is full of threads, and one killed leaves none.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from controllers.errors import CheckpointFailed, WaitTimeout
from miles.trainer.folders import publish, refuse_occupied, temporary_beside

ANSWER_MARGIN_S = 10.0
"""How much longer than the threads' own collectives `wait` waits: theirs is the better error."""


class CheckpointWriter:
    """One rank's side of saving; at most one save is in progress. Made on all ranks at once."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is how long the ranks' threads wait for one another, at the most."""
        self._timeout_s = timeout_s
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._rank = torch.distributed.get_rank()
        self._ending: Future[None] | None = None

    def begin(self, folder: Path, state: dict[str, Any]) -> None:
        """Copy a sharded state, to be written to `folder`; a collective, which waits for the save before it.

        Later changes of the state's tensors do not reach the checkpoint. Raises ConfigError when `folder` is
        occupied, CheckpointFailed when the save before failed.
        """
        self.wait()
        refuse_occupied(folder)
        temporary = self._make_temporary(folder)
        try:
            plan = _Plan(self._group)
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            # Replicas share the writing. Megatron's own index file lies there early; only the rename counts.
            dist_checkpointing.save(state, str(temporary), FullyParallelSaveStrategyWrapper(plan, replicas))
        except BaseException:
            self._remove(temporary)
            raise
        ending: Future[None] = Future()
        self._ending = ending

        def write() -> None:
            try:
                self._write(plan, temporary, folder)
            except BaseException as error:  # noqa: BLE001 - the thread's boundary: `wait` raises it
                ending.set_exception(error)
            else:
                ending.set_result(None)

        threading.Thread(target=write, name=f"checkpoint {folder.name}", daemon=True).start()

    def wait(self) -> None:
        """Return once the save begun last is in its place; at once where there is none.

        Raises CheckpointFailed when a rank could not write, once; WaitTimeout past the deadline.
        """
        ending = self._ending
        if ending is None:
            return
        try:
            ending.result(self._timeout_s + ANSWER_MARGIN_S)
        except TimeoutError as error:
            raise WaitTimeout("the checkpoint is not written yet", waited_for="the writing of a checkpoint") from error
        finally:
            if ending.done() and self._ending is ending:
                self._ending = None

    def _make_temporary(self, folder: Path) -> Path:
        names: list[Any] = [str(temporary_beside(folder))]
        torch.distributed.broadcast_object_list(names, src=0, group=self._group)
        temporary = Path(names[0])
        if self._rank == 0:
            temporary.mkdir(parents=True)
        torch.distributed.barrier(group=self._group)
        return temporary

    def _write(self, plan: _Plan, temporary: Path, folder: Path) -> None:
        """The thread's work; a collective of the ranks' threads."""
        try:
            failures = self._report_to_first(plan, temporary, folder)
        finally:
            self._remove(temporary)
        told: list[Any] = [failures]
        torch.distributed.broadcast_object_list(told, src=0, group=self._group)
        if told[0]:
            raise CheckpointFailed(f"{str(folder)!r} could not be written: {'; '.join(told[0])}", folder=str(folder))

    def _report_to_first(self, plan: _Plan, temporary: Path, folder: Path) -> list[str]:
        """Write this rank's part; on rank 0, put the whole in its place. Returns what failed, as rank 0 sees it."""
        mine = _Written()
        try:
            mine.results = plan.write()
        except Exception as error:  # noqa: BLE001 - rank 0 must hear of any failure, or it would wait for the results
            mine.failure = f"rank {self._rank}: {type(error).__name__}: {error}"
        first = self._rank == 0
        gathered: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
        torch.distributed.gather_object(mine, gathered, dst=0, group=self._group)
        if gathered is None:
            return []
        failures = [written.failure for written in gathered if written.failure]
        if not failures:
            try:
                plan.finish([written.results for written in gathered])
                publish(temporary, folder)
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear how it ended
                failures.append(f"rank 0: {type(error).__name__}: {error}")
        return failures

    def _remove(self, temporary: Path) -> None:
        if self._rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


@dataclass(slots=True)
class _Written:
    """How one rank's writing went."""

    results: Any = None
    failure: str = ""


class _Plan(SaveShardedStrategy):  # type: ignore[misc]
    """Megatron's `torch_dist` format, with `save` only planning and copying; `write` and `finish` come later."""

    def __init__(self, group: Any) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """A collective over `group`."""
        parts, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        for part in chain.from_iterable(parts.values()):
            if isinstance(part, ShardedTensor):
                # copy=True: on CPU `.to("cpu")` is the live tensor itself, which the next optimizer step changes.
                part.data = part.data.detach().to("cpu", copy=True)
        first = torch.distributed.get_rank() == 0
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(parts), is_coordinator=first)
        self._writer = FileSystemWriter(checkpoint_dir)
        self._writer.set_up_storage_writer(first)
        local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        plans: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.gather_object(local, plans if first else None, dst=0, group=self._group)
        if first:
            plans, self._metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        own: list[Any] = [None]
        torch.distributed.scatter_object_list(own, plans if first else None, src=0, group=self._group)
        self._plan = self._planner.finish_plan(own[0])

    def write(self) -> Any:
        """Write this rank's files; returns where in them each tensor lies."""
        return self._writer.write_data(self._plan, self._planner).wait()

    def finish(self, results: list[Any]) -> None:
        """Write the index of all ranks' files; on rank 0."""
        self._writer.finish(self._metadata, results)
