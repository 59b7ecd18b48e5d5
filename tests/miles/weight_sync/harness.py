"""Trainer ranks and engines in this process, with the real publisher, transports, service, controller and pull agent.

Only two things are stand-ins: the ranks are contexts run on threads, and an engine is a FakeEngine whose weight loader
hook is the real agent over a small torch model with SGLang's fused names.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import anyio.to_thread
import msgspec
import torch

from controllers.errors import ActorDied
from controllers.events import Event
from controllers.health import HealthOptions
from controllers.inference_controller import FleetOptions, InferenceController
from controllers.ports import LaunchSpec
from controllers.weight_versions import MemoryLedgerStore, VersionLedger
from miles.weight_sync import agent
from miles.weight_sync.messages import Box
from miles.weight_sync.options import WeightSyncOptions
from miles.weight_sync.plan import whole
from miles.weight_sync.ports import RankRunner
from miles.weight_sync.publisher import close_publisher
from miles.weight_sync.service import WeightSyncService
from tests.fakes.engine import FakeEngine
from tests.fakes.launcher import FakeLauncher
from tests.miles.weight_sync.tensors import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, SHAPES, VOCAB, LocalShard

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT_S = 30.0

class EngineModel(torch.nn.Module):
    """SGLang's fused names over SHAPES, tied embeddings. Starts with NaN, so that unwritten weights show."""

    def __init__(self) -> None:
        super().__init__()
        fused = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.layers.0.self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            "model.layers.0.mlp.gate_up_proj.weight": (2 * MLP, HIDDEN),
            "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
            "model.norm.weight": (HIDDEN,),
        }
        for name, shape in fused.items():
            *path, leaf = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, torch.nn.Parameter(torch.full(shape, torch.nan)))

    def global_tensors(self) -> dict[str, torch.Tensor]:
        """Its weights under the names of SHAPES."""
        parameters = {name: parameter.detach() for name, parameter in self.named_parameters()}
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        qkv = parameters.pop("model.layers.0.self_attn.qkv_proj.weight")
        gate_up = parameters.pop("model.layers.0.mlp.gate_up_proj.weight")
        for part, rows in zip("qkv", torch.split(qkv, [q, kv, kv]), strict=True):
            parameters[f"model.layers.0.self_attn.{part}_proj.weight"] = rows
        for part, rows in zip(("gate", "up"), torch.split(gate_up, [MLP, MLP]), strict=True):
            parameters[f"model.layers.0.mlp.{part}_proj.weight"] = rows
        return parameters


@dataclass
class LocalRank:
    """A rank's context: the boxes of `weights` that `cut` gives it."""

    rank: int
    world_size: int
    weights: dict[str, torch.Tensor]
    cut: Callable[[str, tuple[int, ...], int, int], Box]
    plugins: dict[str, Any] = field(default_factory=dict)
    lost: bool = False

    def shards(self) -> Iterator[LocalShard]:
        if self.lost:
            return
        for name, tensor in self.weights.items():
            box = self.cut(name, tuple(tensor.shape), self.rank, self.world_size)
            view = tensor
            for dim, (start, length) in enumerate(box):
                view = view.narrow(dim, start, length)
            yield LocalShard(name, tuple(tensor.shape), box, view)


def cut_rows_or_columns(name: str, shape: tuple[int, ...], rank: int, world: int) -> Box:
    """As tensor parallelism cuts: norms whole on every rank, o and down by columns, all else by rows."""
    box = list(whole(shape))
    if len(shape) == 1:
        return tuple(box)
    dim = 1 if "o_proj" in name or "down_proj" in name else 0
    size = shape[dim] // world
    box[dim] = (rank * size, size)
    return tuple(box)


class LocalRanks:
    """A RankRunner over contexts in this process. `calls` names the functions run, `slots` where versions were staged.

    `dead` makes every call raise as a lost rank does, `lost_in` the next call of that function, after which others are
    there; `rank.lost` makes that rank's tensors not what they were.
    """

    def __init__(self, world: int = 1, weights: dict[str, torch.Tensor] | None = None) -> None:
        self.weights = weights or {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.ranks = [LocalRank(rank, world, self.weights, cut_rows_or_columns) for rank in range(world)]
        self.calls: list[str] = []
        self.slots: list[int] = []
        self.dead = False
        self.lost_in = ""
        self.incarnation = 1
        self.steps_done = 0

    def step(self, seed: int) -> None:
        """New weights, the same for the same seed, which is the step's number."""
        self.steps_done = seed
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            tensor.normal_(generator=generator)

    def lose(self) -> None:
        """The ranks' processes die and others take their place, with the same weights."""
        for rank in self.ranks:
            close_publisher(rank)
        self.ranks = [LocalRank(rank.rank, rank.world_size, self.weights, rank.cut) for rank in self.ranks]
        self.incarnation += 1

    async def on_each_rank(
        self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        self.calls.append(function.__name__)
        if function.__name__ == "stage":
            self.slots.append(int(str(args[0])))
        if function.__name__ == self.lost_in:
            self.lost_in = ""
            self.lose()
            raise ActorDied("trainer-0 died", actor="trainer-0")
        if self.dead:
            raise ActorDied("trainer-0 died", actor="trainer-0")
        return [
            await anyio.to_thread.run_sync(functools.partial(function, rank, *args, **kwargs)) for rank in self.ranks
        ]


class AgentEngine(FakeEngine):
    """Runs the real agent over a model of its own."""

    def __init__(self, spec: LaunchSpec, pid: int) -> None:
        super().__init__(spec, pid=pid)
        self.model = EngineModel()
        self.loads = 0
        self.drop_installs = False

    async def call_weight_loader(self, loader: str, manifest: bytes, timeout_s: float) -> None:
        await super().call_weight_loader(loader, manifest, timeout_s)
        assert loader == f"{agent.__name__}.{agent.load.__name__}"
        tensor = torch.frombuffer(bytearray(manifest), dtype=torch.uint8)
        self.loads += 1
        if self.drop_installs and msgspec.json.decode(manifest)["type"] == "install":
            return
        await anyio.to_thread.run_sync(agent.load, self.model, [("manifest", tensor)])


@dataclass
class Rig:
    """Everything of one test. `events` is every event of the controller, in order."""

    controller: InferenceController
    ranks: LocalRanks
    service: WeightSyncService
    launcher: FakeLauncher
    events: list[Event]

    def engine(self, name: str = "engine-0") -> AgentEngine:
        newest = self.launcher.newest(name)
        assert isinstance(newest, AgentEngine)
        return newest

    async def serving(self, version: int, count: int | None = None) -> None:
        await self.controller.wait_serving(count=count, version=version, timeout_s=TIMEOUT_S)


async def publish(r: Rig, seed: int) -> int:
    """New weights, published; the version's number."""
    r.ranks.step(seed)
    return (await r.service.publish(seed)).number


def same(model: EngineModel, weights: dict[str, torch.Tensor]) -> bool:
    """Whether an engine's live weights are bit for bit these."""
    live = model.global_tensors()
    return live.keys() == weights.keys() and all(torch.equal(live[name], weights[name]) for name in weights)


@asynccontextmanager
async def rig(
    *,
    count: int = 1,
    world: int = 1,
    options: WeightSyncOptions | None = None,
    runner: RankRunner | None = None,
) -> AsyncIterator[Rig]:
    """A controller over `count` engines, the service, and `world` trainer ranks here or what `runner` runs."""
    launcher = FakeLauncher(make=AgentEngine)
    events: list[Event] = []
    controller = InferenceController(
        launcher,
        VersionLedger(MemoryLedgerStore()),
        FleetOptions(count=count, restart_backoff_s=0.0, health=HealthOptions(interval_s=1e6)),
    )
    controller.bus.add_sink(lambda _time, event: events.append(event))
    ranks = LocalRanks(world)
    service = WeightSyncService(controller, runner or ranks, options or WeightSyncOptions())
    try:
        async with controller, service:
            yield Rig(controller, ranks, service, launcher, events)
    finally:
        await anyio.to_thread.run_sync(agent.close_all)


def quick(**changes: Any) -> WeightSyncOptions:
    """Options for tests: short deadlines."""
    base = WeightSyncOptions(pull_timeout_s=5.0, vote_timeout_s=5.0, start_timeout_s=30.0, slot_wait_s=0.2)
    return replace(base, **changes)
