"""A trainer without Megatron: the Hugging Face model and AdamW, in one Ray actor, plugged into a run from the YAML.

    miles train examples/plain_torch_trainer.yaml

`make` is the factory that `trainer.backend` names. Everything a run needs of a trainer is in
`miles.trainer.protocol.Trainer`; advantages, losses and the learning rate's course come from Miles, and weight sync
finds the weights by itself, through `PlainRank.shards`. Sequences go through the model one by one: short, not fast.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from controllers.errors import ConfigError
from executors.trajectory import Batch
from miles.cluster.actors import ActorOptions, RemoteActor, start_actor
from miles.trainer.folders import new_folder
from miles.trainer.options import TrainerOptions
from miles.trainer.protocol import Example, StepStats, TensorShard
from miles.trainer.rl_batch import prepare
from miles.trainer.schedule import learning_rate
from miles.trainer.sequences import TokenSequence

CHECKPOINT_FILE = "state.pt"


@asynccontextmanager
async def make(options: TrainerOptions, folder: Path, *, attention: str = "sdpa") -> AsyncIterator[PlainTorchTrainer]:
    """The factory. `attention` comes from `trainer.backend_options`; the run's folder is not needed."""
    if options.parallel.world_size > 1 or options.device != "cpu":
        raise ConfigError("trainer.backend: the plain trainer has one rank, on CPU", key="trainer.backend")
    if options.recompute or options.skip_grad_norm is not None:
        message = "trainer.backend: the plain trainer has neither trainer.recompute nor trainer.skip_grad_norm"
        raise ConfigError(message, key="trainer.backend")
    if options.algorithm.kl is not None:
        raise ConfigError("trainer.backend: the plain trainer keeps no reference model", key="algorithm.kl")
    actor = start_actor(PlainRank, options, attention, options=ActorOptions("plain-trainer"))
    try:
        await actor.call("open", timeout_s=options.start_timeout_s)
        yield PlainTorchTrainer(actor, options.call_timeout_s)
    finally:
        actor.kill()


class PlainTorchTrainer:
    """The driver's end: implements `miles.trainer.protocol.Trainer` by asking the actor."""

    incarnation = 0

    def __init__(self, actor: RemoteActor, timeout_s: float) -> None:
        self.steps_done = 0
        self._actor = actor
        self._timeout_s = timeout_s
        self._turn = anyio.Lock()

    async def step(self, batch: Batch) -> StepStats:
        stats: StepStats = await self._call("step", batch)
        self.steps_done = stats.step
        return stats

    async def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        stats: StepStats = await self._call("warmup_step", examples, lr)
        return stats

    async def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        values: list[list[float]] = await self._call("logprobs", sequences)
        return values

    async def on_each_rank(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [await self._call("run_function", function, args, kwargs)]

    async def save(self, folder: Path, on_copied: Callable[[], None] = lambda: None) -> None:
        await self._call("save", _absolute(folder))

    async def load(self, folder: Path) -> None:
        self.steps_done = await self._call("load", _absolute(folder))

    async def export(self, folder: Path) -> None:
        await self._call("export", _absolute(folder))

    async def _call(self, method: str, *args: Any) -> Any:
        async with self._turn:  # so that a call's deadline does not include the call before it
            return await self._actor.call(method, *args, timeout_s=self._timeout_s)


class PlainRank:
    """The actor: model, optimizer, and what functions of `on_each_rank` see. Torch is imported only here."""

    rank = 0
    world_size = 1

    def __init__(self, options: TrainerOptions, attention: str) -> None:
        self.plugins: dict[str, Any] = {}
        self._options = options
        self._attention = attention
        self._steps = self._warmup_steps = 0
        self._model: Any = None
        self._optimizer: Any = None
        self._objective: Any = None

    def open(self) -> None:
        """Load the model."""
        import torch
        from transformers import AutoModelForCausalLM

        from miles.algorithms.objective import Objective

        options = self._options
        torch.set_num_threads(options.threads)
        self._objective = Objective(options.algorithm)
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model_path, dtype=torch.float32, attn_implementation=self._attention
        )
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        )

    def shards(self) -> Iterator[TensorShard]:
        """Every parameter, whole, under the name it has in a checkpoint; a tied head is not among them."""
        for name, parameter in self._model.named_parameters():
            shape = tuple(parameter.shape)
            yield TensorShard(name, shape, tuple((0, length) for length in shape), parameter.data)

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The rank's end of `on_each_rank`."""
        return function(self, *args, **kwargs)

    def step(self, batch: Batch) -> StepStats:
        """One step on the loss that `algorithm` asks for."""
        if batch.step != self._steps + 1:
            raise ValueError(f"a batch for step {batch.step}, but the next step is {self._steps + 1}")
        prepared = prepare(batch, self._options.algorithm)
        if any(sequence.kept is not None for sequence in prepared.sequences):
            message = "rollout.sampling_mask: the plain trainer takes logprobs over the whole vocabulary"
            raise ConfigError(message, key="rollout.sampling_mask")
        lr = learning_rate(self._options, batch.step)
        metrics = self._update(prepared.sequences, self._loss, lr)
        self._steps = batch.step
        return StepStats(batch.step, prepared.metrics | metrics)

    def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step."""
        tokens = sum(len(example.completion_ids) for example in examples)
        sequences = [TokenSequence(one.prompt_ids, one.completion_ids, weight=1.0 / tokens) for one in examples]
        metrics = self._update(sequences, lambda sequence: -self._logprobs(sequence, 1.0)[0], lr)
        self._warmup_steps += 1
        return StepStats(self._warmup_steps, metrics)

    def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The logprob of each response token."""
        import torch

        temperature = self._options.temperature
        with torch.no_grad():
            return [
                self._logprobs(TokenSequence(prompt, response), temperature)[0].tolist() if response else []
                for prompt, response in sequences
            ]

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        import torch

        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        with new_folder(folder) as temporary:
            torch.save({**state, "steps": self._steps, "warmup_steps": self._warmup_steps}, temporary / CHECKPOINT_FILE)

    def load(self, folder: Path) -> int:
        """Read it back; the number of steps done."""
        import torch

        state = torch.load(folder / CHECKPOINT_FILE)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps, self._warmup_steps = state["steps"], state["warmup_steps"]
        return self._steps

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        with new_folder(folder) as temporary:
            self._model.save_pretrained(temporary)
            for file in self._options.model_path.glob("*.json"):
                if not (temporary / file.name).exists():
                    shutil.copy(file, temporary)

    def _update(self, sequences: Sequence[TokenSequence], loss: Callable[[TokenSequence], Any], lr: float) -> Any:
        """Accumulate gradients sequence by sequence, then step. `loss(sequence)` is that of each trained token."""
        import torch

        self._optimizer.zero_grad()
        total = 0.0
        for sequence in sequences:
            value = loss(sequence).sum() * sequence.weight
            value.backward()
            total += float(value)
        clip = self._options.clip_grad or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return {"loss": total, "grad_norm": norm, "lr": lr}

    def _loss(self, sequence: TokenSequence) -> Any:
        import torch

        from miles.algorithms.tokens import TrainedTokens

        logprobs, entropy = self._logprobs(sequence, self._options.temperature)
        mask = torch.tensor(sequence.mask or [True] * len(logprobs))
        tokens = TrainedTokens(
            logprobs=logprobs[mask],
            behaviour=torch.tensor(sequence.behaviour)[mask],
            advantages=torch.tensor(sequence.advantages)[mask],
            sequence=torch.zeros(int(mask.sum()), dtype=torch.int64),
            sequences=1,
            entropy=entropy[mask],
            staleness=torch.tensor(sequence.staleness)[mask],
        )
        return self._objective(tokens).values

    def _logprobs(self, sequence: TokenSequence, temperature: float) -> tuple[Any, Any]:
        """Logprob and entropy of each response token, differentiable."""
        import torch

        ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
        logits = self._model(ids[:, :-1]).logits[0, len(sequence.prompt_ids) - 1 :].float() / temperature
        distribution = logits.log_softmax(-1)
        logprobs = distribution.gather(-1, ids[0, len(sequence.prompt_ids) :, None])[:, 0]
        return logprobs, -(distribution.exp() * distribution).sum(-1)


def _absolute(path: Path) -> Path:
    """The same path in the actor, whose working folder is another."""
    return path.absolute()
