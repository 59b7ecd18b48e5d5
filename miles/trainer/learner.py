"""One rank's model, optimizer and counters, and the steps on them. Runs in the rank's process (or in a test's).

    batch -> advantages -> TokenSequences -> micro-batches -> forward, loss / tokens of the whole batch, backward
          -> gradients summed over ranks -> clip -> AdamW

The supervised warm-up and reinforcement learning share one optimizer: Adam's moments go on when RL begins, and RL's
own linear warm-up of the learning rate takes the place of a reset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from executors.trajectory import Batch
from miles.algorithms.losses.supervised import supervised
from miles.algorithms.objective import Objective
from miles.algorithms.tokens import TokenLoss, TrainedTokens
from miles.trainer import checkpoint, weights
from miles.trainer.checkpoint import Counters
from miles.trainer.logprobs import entropies, scaled_logits, token_logprobs
from miles.trainer.model import build_model, read_architecture
from miles.trainer.optimizer import PortableFP32Optimizer, learning_rate, reduce_gradients, total_over_data_parallel
from miles.trainer.options import TrainerOptions
from miles.trainer.packing import MicroBatch, pack
from miles.trainer.protocol import Example, StepStats, TensorShard
from miles.trainer.rl_batch import prepare
from miles.trainer.sequences import TokenSequence
from miles.trainer.shards import iter_shards

LossFunction = Callable[[MicroBatch, Tensor], TokenLoss]


class Learner:
    """Needs `torch.distributed` and Megatron's parallel state. Raises ConfigError for a model it cannot load."""

    def __init__(self, options: TrainerOptions) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.counters = Counters()
        self.arch = read_architecture(options.model_path)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.model = build_model(self.arch, tensor_parallel=self.tp_group.size())
        weights.load_hf(self.model, options.model_path, self.arch, self.tp_group.rank(), self.tp_group.size())
        self.optimizer = PortableFP32Optimizer(self.model, options)
        self._objective = Objective(options.algorithm)

    def step(self, batch: Batch) -> StepStats:
        """One RL step. Counts as a step also where it was skipped: no trained token, or a gradient not finite.

        Raises ValueError when `batch` is not for the next step.
        """
        started = time.perf_counter()
        if batch.step != self.counters.steps + 1:
            raise ValueError(f"a batch for step {batch.step}, but the next step is {self.counters.steps + 1}")
        prepared = prepare(batch, self.options.algorithm)
        step = batch.step
        lr = learning_rate(self.options, step)

        def loss(micro: MicroBatch, logprobs: Tensor) -> TokenLoss:
            return self._objective(_tokens(micro, logprobs))

        metrics, skipped = self._update(prepared.sequences, loss, lr, sampled=True)
        self.counters = Counters(step, self.counters.warmup_steps, self.counters.skipped_steps + skipped)
        metrics |= prepared.metrics
        metrics["skipped_steps"] = float(self.counters.skipped_steps)
        metrics["train_s"] = time.perf_counter() - started
        return StepStats(step, metrics)

    def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step. Its number counts warm-up steps."""
        started = time.perf_counter()
        sequences = [TokenSequence(e.prompt_ids, e.completion_ids) for e in examples if e.completion_ids]
        metrics, skipped = self._update(sequences, _imitate, lr, sampled=False)
        done = self.counters.warmup_steps + 1
        self.counters = Counters(self.counters.steps, done, self.counters.skipped_steps + skipped)
        metrics["skipped_steps"] = float(self.counters.skipped_steps)
        metrics["train_s"] = time.perf_counter() - started
        return StepStats(done, metrics)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Logprob of each response token, temperature applied; [] for an empty response."""
        filled = [index for index, (_, response) in enumerate(sequences) if response]
        packable = [TokenSequence(*sequences[index]) for index in filled]
        result: list[list[float]] = [[] for _ in sequences]
        for micro in pack(packable, self.options.micro_batch_tokens):
            values = token_logprobs(self._scaled_logits(micro, self.options.temperature), micro.targets).tolist()
            start = 0
            for index in micro.indices:
                end = start + len(packable[index].response_ids)
                result[filled[index]] = values[start:end]
                start = end
        return result

    def shards(self) -> Iterator[TensorShard]:
        """Live views of this rank's parameters as boxes of the Hugging Face tensors."""
        parameters = dict(self.model.named_parameters())
        return iter_shards(parameters, self.arch, self.tp_group.rank(), self.tp_group.size())

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective over all ranks."""
        checkpoint.save(folder, self.model, self.optimizer, self.counters)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place: views handed out by `shards` stay valid."""
        self.counters = checkpoint.load(folder, self.model, self.optimizer)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder from rank 0; collective over all ranks."""
        tensors = weights.gather(self.model, self.arch, self.tp_group)
        if torch.distributed.get_rank() == 0:
            weights.export_hf(tensors, self.options.model_path, folder)
        torch.distributed.barrier()

    def _scaled_logits(self, micro: MicroBatch, temperature: float) -> Tensor:
        """fp32 logits / temperature for the response tokens of a micro-batch, [n, vocab / tp]."""
        logits = self.model(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.packed)[0]
        return scaled_logits(
            logits.index_select(0, micro.rows), self.arch.vocab, temperature, self.tp_group.rank()
        )

    def _update(
        self, sequences: Sequence[TokenSequence], loss: LossFunction, lr: float, *, sampled: bool
    ) -> tuple[dict[str, float], bool]:
        """Forward, backward and optimizer step over all ranks. Returns token-mean metrics, and whether it skipped.

        `sampled` is for sampled tokens: logits at the temperature they were sampled at, compared with the engine's
        logprobs. Supervised tokens were sampled by nobody, so theirs are at temperature 1.
        """
        temperature = self.options.temperature if sampled else 1.0
        tokens = sum(len(sequence.response_ids) for sequence in sequences)
        metrics = {"tokens": float(tokens), "lr": lr}
        if not tokens:
            return metrics | {"loss": 0.0, "grad_norm": 0.0}, True
        data_rank = parallel_state.get_data_parallel_rank()
        data_size = parallel_state.get_data_parallel_world_size()
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        largest = torch.zeros(())
        for micro in pack(sequences[data_rank::data_size], self.options.micro_batch_tokens):
            scaled = self._scaled_logits(micro, temperature)
            logprobs = token_logprobs(scaled, micro.targets)
            result = loss(micro, logprobs)
            # Divided by the tokens of the whole batch, over all micro-batches and ranks: the token mean is exact.
            torch.autograd.backward(result.values.sum() / tokens)
            values = {"loss": result.values.detach(), "entropy": entropies(scaled.detach(), self.tp_group)}
            if sampled:
                difference = micro.behaviour - logprobs.detach()
                values |= {"kl_behaviour": difference, "logprob_diff_mean": difference.abs()}
                largest = torch.maximum(largest, difference.abs().amax())
            for name, value in (values | result.metrics).items():
                sums[name] = sums.get(name, torch.zeros(())) + value.sum()
        reduce_gradients(self.model)
        outcome = self.optimizer.apply(lr, self.options.clip_grad)
        if sums:
            totals = total_over_data_parallel(torch.stack(list(sums.values()))) / tokens
            metrics |= dict(zip(sums, totals.tolist(), strict=True))
        if sampled:
            metrics["logprob_diff_max"] = float(largest)
        return metrics | {"grad_norm": outcome.grad_norm}, outcome.skipped


def _tokens(micro: MicroBatch, logprobs: Tensor) -> TrainedTokens:
    return TrainedTokens(logprobs, micro.behaviour, micro.advantages, micro.sequence, len(micro.indices))


def _imitate(micro: MicroBatch, logprobs: Tensor) -> TokenLoss:
    return supervised(_tokens(micro, logprobs), micro.behaviour)
