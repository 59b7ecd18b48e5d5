"""The one place that calls `ray.remote`: typed handles to actors, and Ray's errors mapped to ours, once.

    actor = start_actor(TrainerRank, args..., options=ActorOptions(name="trainer-0"))
    result = await actor.call("step", batch)        # raises ActorDied, or what the method raised
    actor.kill()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from controllers.errors import ActorDied, InfrastructureError, WaitTimeout


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """How to place and start an actor. `max_concurrency` above 1 is for async actors only.

    `env` costs a second at the start: Ray cannot use a process that it has warm.
    """

    name: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    max_concurrency: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    threads: Mapping[str, int] = field(default_factory=dict)
    """Threads beside the one for all calls, by a name: `call(..., thread=name)` runs there."""


class RemoteActor:
    """A handle to one actor."""

    def __init__(self, handle: ActorHandle[Any], name: str) -> None:
        self._handle = handle
        self.name = name

    async def call(self, method: str, /, *args: Any, timeout_s: float | None = None, thread: str | None = None) -> Any:
        """Call a method and await its result. Cancelling the wait does not stop the method.

        Raises ActorDied when the actor is gone, InfrastructureError for other failures of Ray (an object lost, no
        memory), WaitTimeout after `timeout_s`, else what the method raised.
        """
        with anyio.move_on_after(timeout_s):
            try:
                bound = getattr(self._handle, method)
                return await (bound if thread is None else bound.options(concurrency_group=thread)).remote(*args)
            except RayTaskError as error:
                # First: Ray's class derives from what the method raised too, and could pass for another error below.
                cause = error.cause
                if isinstance(cause, Exception) and not isinstance(cause, RayError):
                    raise cause from error
                raise self._failure(method, error) from error
            except RayActorError as error:
                raise ActorDied(f"{self.name} died in {method}: {error}", actor=self.name) from error
            except RayError as error:
                raise self._failure(method, error) from error
        raise WaitTimeout(
            f"{self.name}.{method} did not return within {timeout_s} s",
            waited_for=f"{self.name}.{method}",
            timeout_s=timeout_s,
        )

    def _failure(self, method: str, error: RayError) -> InfrastructureError:
        return InfrastructureError(f"{self.name}.{method}: {type(error).__name__}: {error}", actor=self.name)

    def kill(self) -> None:
        """End the actor's process at once. Harmless when it, or all of Ray, is gone."""
        if ray.is_initialized():
            ray.kill(self._handle, no_restart=True)


def start_actor(cls: type[Any], /, *args: Any, options: ActorOptions) -> RemoteActor:
    """Start an actor of class `cls`. It is alive once its first call returns."""
    runtime_env = {"env_vars": dict(options.env)} if options.env else None
    remote_class = ray.remote(cls)
    if options.threads:
        remote_class = ray.remote(concurrency_groups=dict(options.threads))(cls)  # type: ignore[call-overload]
    handle = remote_class.options(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        max_concurrency=options.max_concurrency,
        runtime_env=runtime_env,
    ).remote(*args)
    return RemoteActor(handle, options.name)
