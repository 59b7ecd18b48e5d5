"""The sections about generating: engines, inference, rollout, weight_sync and cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from controllers.ports import PauseMode
from miles.config.base import Count, OnlyOne, PositiveInt, Seconds, Section

_PLANNED_ENGINE_KINDS = ("sglang", "external")


class RestartConfig(Section):
    """`engines.restart`: what happens when an engine crashes."""

    budget: Count = 5
    """Crash restarts of one engine before it stays down."""

    backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """Wait before the first restart; doubled with each crash that follows."""


class HealthConfig(Section):
    """`engines.health`: how a hanging engine is told from a busy one."""

    interval_s: Seconds = 2.0
    """Seconds between two probes of one engine."""

    timeout_s: Seconds = 5.0
    """How long one probe may take."""

    failures: PositiveInt = 3
    """Failed probes in a row, with no token generated between them, that make an engine unhealthy."""

    startup_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """Failed probes within this time of a start are not counted."""


class EnginesConfig(Section):
    """`engines`: the processes that generate."""

    kind: str = "embedded"
    """What an engine is; `embedded` runs on CPU without any inference server installed."""

    count: PositiveInt = 2
    """How many engines to start."""

    tensor_parallel: OnlyOne = 1
    """Ranks of one engine."""

    max_concurrency: PositiveInt = 64
    """Requests one engine works on at once; more wait for a lease."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Further flags of the engine's own command line: `{chunked_prefill_size: 512}` is `--chunked-prefill-size 512`."""

    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """First port; engine i listens at `port + i`. Null lets every engine take a free one."""

    restart: RestartConfig = RestartConfig()
    """Crash restarts."""

    health: HealthConfig = HealthConfig()
    """Health probes."""

    launch_timeout_s: Seconds = 120.0
    """How long a start may take until the server answers."""

    sync_timeout_s: Seconds = 120.0
    """How long a started engine may take until it has proven its first weights, and a serving one for an update.

    A drain waits that long for an update under way."""

    stop_grace_s: Seconds = 5.0
    """Time between the polite signal and the kill when an engine is stopped."""

    @field_validator("kind")
    @classmethod
    def _kind_is_built(cls, value: str) -> str:
        if value in _PLANNED_ENGINE_KINDS:
            raise ValueError("is not supported by this version (supported: 'embedded')")
        if value != "embedded":
            raise ValueError("must be 'embedded'")
        return value


class InferenceConfig(Section):
    """`inference`: how the controller restarts engines on purpose."""

    rolling_restart_at_step: PositiveInt | None = None
    """After this training step every engine is restarted, one after the other, while training goes on.

    A step past the end of the run never comes."""

    max_unavailable: PositiveInt = 1
    """Engines that may be out of service at once during a rolling restart."""

    drain_timeout_s: Seconds = 30.0
    """How long requests may go on in a draining engine before they are cut and continued elsewhere."""


class RolloutConfig(Section):
    """`rollout`: how samples are made."""

    group_size: Annotated[int, Field(ge=1, le=1000)] = 16
    """Samples of one prompt."""

    max_tokens: PositiveInt = 16
    """Most tokens of one response."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the trainer applies the same one to its own logprobs."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""

    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""

    sampling_mask: bool = False
    """Take logprobs on both sides within the tokens that `top_p` and `top_k` kept, as the engine tells them.

    Without it both are over the whole vocabulary: not what a truncated sampler drew from. SGLang wants a `top_k`."""

    routing_replay: bool = False
    """Send each token to the experts that the engine chose (R3); for engines that tell them, so not `embedded` ones.

    SGLang tells them when started with `engines.args: {enable_return_routed_experts: true}`."""

    max_staleness: Count = 1
    """Optimizer steps that may lie between the weights that sampled a token and the step that trains it."""

    partial: Literal["continue", "restart", "drop"] = "continue"
    """What becomes of a sequence whose engine went away: go on from its tokens, begin again, or drop its group."""

    request_timeout_s: Seconds = 120.0
    """How long one request may wait for its next tokens."""

    max_retries: Count = 5
    """Interruptions of one sequence in a row, without a token gained, before its group fails."""

    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal: they teach a group baseline nothing."""

    @field_validator("top_k")
    @classmethod
    def _top_k_is_off_or_positive(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be -1 (off) or at least 1")
        return value


class WeightSyncConfig(Section):
    """`weight_sync`: how new weights get into engines."""

    transport: str = "rdt"
    """A plugin of the entry point group `miles.weight_sync`: `rdt` (NIXL READ) or `disk` (safetensors)."""

    mode: PauseMode = "in_place"
    """What an update does to running requests: hold and go on, take back to the queue, or abort."""

    max_updating: PositiveInt | None = None
    """Engines that may be in an update's pause at once; null is all of them."""

    n_slots: Annotated[int, Field(ge=2)] = 2
    """Versions a trainer rank can hold for readers: one committed, one being written."""

    pull_timeout_s: Seconds = 60.0
    """How long an engine may take to pull and verify a version."""

    vote_timeout_s: Seconds = 60.0
    """How long to wait for the votes of all ranks of an engine."""

    audit_every: Count = 50
    """Every so many updates an engine's live parameters are digested again; 0 never."""


class ClusterConfig(Section):
    """`cluster`: Ray."""

    address: str | None = None
    """Address of a Ray cluster to join; null starts a local one for this run and removes it afterwards."""

    object_store_mb: Annotated[int, Field(ge=80)] = 128
    """Shared memory of a local cluster's object store, in MiB."""
