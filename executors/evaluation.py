"""Sampling for evaluation: one trajectory per prompt, beside training and not in its account."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from executors.errors import TrajectoryFailed
from executors.group_runner import GroupRunner
from executors.sampling_client import SamplingParams
from executors.trajectory import Prompt, StopReason, Trajectory


async def sample_all(
    runner: GroupRunner, prompts: Sequence[Prompt], sampling: SamplingParams, *, first_number: int, concurrency: int
) -> list[Trajectory]:
    """Sample and score every prompt once, at most `concurrency` at a time; results in the order of `prompts`.

    A prompt that is too long gets an empty response and no reward. Raises the first error of any of them, after
    the others have been cancelled. Requests are named `e<number>`, counted from `first_number`.
    """
    results: list[Trajectory | None] = [None] * len(prompts)
    errors: list[Exception] = []
    remaining = iter(range(len(prompts)))

    async def work() -> None:
        for index in remaining:
            try:
                results[index] = await _sample_one(runner, prompts[index], sampling, first_number + index)
            except Exception as error:  # noqa: BLE001 - kept, and raised below without the task group around it
                errors.append(error)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(min(concurrency, len(prompts))):
            tasks.start_soon(work)
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]


async def _sample_one(runner: GroupRunner, prompt: Prompt, sampling: SamplingParams, number: int) -> Trajectory:
    too_long = Trajectory(prompt.ids, (), (), (), StopReason.LENGTH)
    if runner.is_too_long(prompt):
        return too_long
    try:
        return await runner.sample(f"e{number:010d}-s000", prompt, runner.new_stream(prompt, sampling), sampling)
    except TrajectoryFailed as error:
        if error.reason == "prompt_too_long":
            return too_long
        raise
