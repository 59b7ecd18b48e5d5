"""Probes one incarnation until it looks dead. Emits ProbeFailed and EngineUnhealthy; the supervisor decides.

A busy engine is not a dead one: failures count only after a start-up grace (engines compile at first), only in a row,
and only if no token was generated since the probe before, by the engine's own count or as seen by lease holders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from controllers.errors import ConfigError, InfrastructureError
from controllers.events import EngineUnhealthy, Event, ProbeFailed
from controllers.ports import Engine


@dataclass(frozen=True)
class HealthOptions:
    """A probe every `interval_s`, each at most `timeout_s`; `failures` in a row, after the grace, are too many."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    failures: int = 5
    startup_grace_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"health.{name} must be above 0, not {getattr(self, name)!r}", key=f"health.{name}")
        if self.failures < 1:
            raise ConfigError(f"health.failures must be at least 1, not {self.failures!r}", key="health.failures")


class HealthProbe:
    """The probe loop of one incarnation. `tokens_seen()` rises with the tokens that lease holders received from it."""

    def __init__(
        self,
        engine: Engine,
        options: HealthOptions,
        publish: Callable[[Event], None],
        tokens_seen: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._options = options
        self._publish = publish
        self._tokens_seen = tokens_seen
        self._tokens_generated = 0

    async def run(self) -> str:
        """Probe until the engine is unhealthy; publish that, and return why in words."""
        grace_ends = anyio.current_time() + self._options.startup_grace_s
        consecutive, seen = 0, self._progress()
        while True:
            await anyio.sleep(self._options.interval_s)
            detail = await self._probe()
            before, seen = seen, self._progress()
            progressed = seen != before
            if detail is None:
                consecutive = 0
                continue
            excused = progressed or anyio.current_time() < grace_ends
            consecutive = 0 if excused else consecutive + 1
            self._publish(ProbeFailed(self._engine.engine, self._engine.incarnation, consecutive, detail))
            if consecutive >= self._options.failures:
                words = f"{consecutive} health probes in a row failed without progress, the last one: {detail}"
                self._publish(EngineUnhealthy(self._engine.engine, self._engine.incarnation, words))
                return words

    def _progress(self) -> tuple[int, int]:
        return self._tokens_generated, self._tokens_seen()

    async def _probe(self) -> str | None:
        """What was wrong with the answer, or None."""
        try:
            with anyio.fail_after(self._options.timeout_s):
                health = await self._engine.health(self._options.timeout_s)
        except TimeoutError:
            return f"no answer within {self._options.timeout_s} s"
        except InfrastructureError as error:
            self._tokens_generated = error.ids.get("tokens_generated", self._tokens_generated)
            return str(error)
        self._tokens_generated = health.tokens_generated
        return None
