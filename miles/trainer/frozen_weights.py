"""`FrozenWeights`: the weights of a Hugging Face folder as a trainer would hold them, for runs without a trainer.

It has the one method that weight sync asks of a trainer, `on_each_rank`, so engines get and prove these weights by
any transport as they get a trainer's. One rank, as a Ray actor of its own; the driver never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import anyio

from controllers.errors import ConfigError
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.models.architecture import ties_embeddings
from miles.models.folder import read_config, weight_files
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import RankContext, TensorShard

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

TIED_HEAD = "lm_head.weight"
"""The name of an output head in a checkpoint."""


class FrozenWeights:
    """Use as `async with FrozenWeights(options) as weights`; Ray must be running.

    `options` are the trainer's: the folder, the type that parameters have, and deadlines.
    """

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self._actor: RemoteActor | None = None
        self._turn = anyio.Lock()

    async def __aenter__(self) -> Self:
        """Raises ConfigError for a folder whose weights cannot be read."""
        self._actor = start_actor(FrozenRank, self._options, options=ActorOptions("frozen-weights"))
        try:
            await self._actor.call("open", timeout_s=self._options.start_timeout_s)
        except BaseException:
            self._actor.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._actor is not None:
            self._actor.kill()

    @property
    def incarnation(self) -> int:
        """The same for ever: the process is not replaced."""
        return 1

    @property
    def steps_done(self) -> int:
        """None, since the weights do not change."""
        return 0

    async def on_each_rank(
        self, function: Callable[Concatenate[RankContext, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Run an importable function in the process that holds the weights."""
        if self._actor is None:
            raise RuntimeError("the weights are used outside their `async with` block")
        async with self._turn:
            timeout_s = self._options.call_timeout_s
            return [await self._actor.call("run_function", function, args, kwargs, timeout_s=timeout_s)]


class FrozenRank:
    """The actor, and the RankContext that functions see. Call `open` first."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self._tensors: dict[str, Tensor] = {}
        self.plugins: dict[str, Any] = {}
        self.rank = 0
        self.world_size = 1

    def open(self) -> None:
        """Read the folder. Raises ConfigError for weights that cannot be read."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        torch.set_num_threads(self._options.threads)
        dtype = getattr(torch, self._options.dtype)
        folder = self._options.model_path
        for file in weight_files(folder):
            try:
                tensors = load_file(folder / file)
            except (SafetensorError, OSError) as error:
                problem = f"cannot read {str(folder / file)!r}: {error}"
                raise ConfigError(f"model.path: {problem}", key="model.path") from error
            self._tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
        if ties_embeddings(read_config(folder)):
            self._tensors.pop(TIED_HEAD, None)

    def shards(self) -> Iterator[TensorShard]:
        """Every tensor of the folder, whole; a tied output head, which some folders hold too, is not among them."""
        for name, tensor in self._tensors.items():
            shape = tuple(tensor.shape)
            yield TensorShard(name, shape, tuple((0, length) for length in shape), tensor)

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`function(self, *args, **kwargs)`."""
        return function(self, *args, **kwargs)
