"""The executor over the real InferenceController: what the fake lease source promises holds there too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio

from controllers.ports import LaunchSpec
from executors.journal import Journal
from executors.rollout_executor import RolloutExecutor
from tests.controllers.harness import running
from tests.executors.world import OPTIONS, Prompts, Scorer, assert_bit_for_bit
from tests.fakes.engine import FakeEngine
from tests.fakes.launcher import FakeLauncher
from tests.fakes.sampling_client import FakeSamplingClient
from tests.support.virtual_time import virtual_time


class GeneratingEngine(FakeEngine):
    """A FakeEngine whose process also serves a FakeSamplingClient."""

    def __init__(self, spec: LaunchSpec, pid: int, client: FakeSamplingClient) -> None:
        super().__init__(spec, pid=pid)
        self.server = client.serve(self.url, spec.incarnation, version=1, token_s=1.0)

    def exit(self, returncode: int | None, detail: str = "gone") -> None:
        self.server.die()
        super().exit(returncode, detail)


@virtual_time
async def test_rolling_restart_and_a_crash_lose_nothing(tmp_path: Path) -> None:
    """Every group is trained, in spite of two planned restarts and a crash; no sample fails and no lease is left."""
    client = FakeSamplingClient()
    launcher = FakeLauncher(launch_s=7, make=lambda spec, pid: GeneratingEngine(spec, pid, client))
    options = replace(OPTIONS, max_staleness=100, concurrency=16)  # no new weights here: one version all along
    async with (
        Journal(tmp_path / "journal.sqlite") as journal,
        running(2, launcher=launcher, max_unavailable=1) as fleet,
        RolloutExecutor(fleet.controller, client, Scorer(), journal, options, lambda version: 0) as executor,
    ):

        async def disturb() -> None:
            await anyio.sleep(5.5)
            await fleet.controller.rolling_restart()
            launcher.newest("engine-0").exit(-9)

        moved = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb)
            async for batch in executor.batches(Prompts(40)):
                executor.mark_trained(batch)
                for group in batch.groups:
                    for trajectory in group.trajectories:
                        assert_bit_for_bit(trajectory, 8)
                        moved += len({span.incarnation for span in trajectory.spans}) > 1
        assert moved >= 3
        assert (executor.account.trained, executor.account.live, executor.account.lost) == (40, 0, 0)
        assert fleet.controller.statistics().leases_held == 0
