"""How trainer ranks share a model and a batch, and where one rank stands in it. Torch-free.

Ranks are numbered as Megatron-core numbers them: tensor parallel innermost, then context, data and pipeline.
Experts are spread over ranks that differ in context and data only; within an expert, tensor parallelism goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from controllers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Number of ranks along each dimension. Raises ConfigError for sizes that do not fit one another."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    """Ranks that share the experts of a layer; divides `context * data`."""
    sequence: bool = False
    """Sequence parallelism: outside attention and MLP, tensor-parallel ranks share the tokens."""

    def __post_init__(self) -> None:
        for key in ("tensor", "pipeline", "context", "data", "expert"):
            size = getattr(self, key)
            if size < 1:
                name = f"trainer.{key}_parallel"
                raise ConfigError(f"{name} must be 1 or more, not {size!r}", key=name)
        if (self.context * self.data) % self.expert:
            raise ConfigError(
                f"trainer.expert_parallel = {self.expert} must divide data_parallel x context_parallel = "
                f"{self.context * self.data}",
                key="trainer.expert_parallel",
            )
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "trainer.sequence_parallel needs trainer.tensor_parallel above 1, got 1",
                key="trainer.sequence_parallel",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.context * self.data


ONE_RANK = ParallelSizes()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands: its index along each dimension of `sizes`."""

    sizes: ParallelSizes = ONE_RANK
    tensor: int = 0
    pipeline: int = 0
    context: int = 0
    data: int = 0

    @classmethod
    def of(cls, rank: int, sizes: ParallelSizes) -> Place:
        """The place of global rank `rank`."""
        rest, tensor = divmod(rank, sizes.tensor)
        rest, context = divmod(rest, sizes.context)
        pipeline, data = divmod(rest, sizes.data)
        return cls(sizes, tensor, pipeline, context, data)

    @property
    def rank(self) -> int:
        """The global rank."""
        sizes = self.sizes
        return self.tensor + sizes.tensor * (self.context + sizes.context * (self.data + sizes.data * self.pipeline))

    @property
    def expert(self) -> int:
        """Index among the ranks that share the experts of a layer."""
        return (self.context + self.sizes.context * self.data) % self.sizes.expert

    @property
    def is_first_stage(self) -> bool:
        """Whether it holds the embedding."""
        return self.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it holds the final norm and the output head."""
        return self.pipeline == self.sizes.pipeline - 1
