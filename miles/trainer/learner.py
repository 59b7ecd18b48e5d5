"""One rank's model, optimizer and counters, and the steps on them. Runs in the rank's process (or in a test's).

    batch -> (reference logprobs) -> advantages, weights -> TokenSequences -> micro-batches, balanced over ranks
          -> forward, weighted sum of the loss, backward -> gradients summed over ranks -> clip -> AdamW

The supervised warm-up and reinforcement learning share one optimizer: Adam's moments go on when RL begins, and RL's
own linear warm-up of the learning rate takes the place of a reset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from executors.trajectory import Batch
from miles.algorithms.losses.supervised import supervised
from miles.algorithms.objective import Objective
from miles.algorithms.tokens import TokenLoss, TrainedTokens
from miles.trainer import checkpoint, gradients, weights
from miles.trainer.architecture import read_architecture
from miles.trainer.checkpoint import Counters
from miles.trainer.checkpoint_writer import CheckpointWriter
from miles.trainer.forward_backward import forward_backward
from miles.trainer.heads import TokenLogprobs, TrainingHead
from miles.trainer.model import build_model
from miles.trainer.optimizer import make_optimizer
from miles.trainer.options import TrainerOptions
from miles.trainer.packing import pack
from miles.trainer.parallel import Place
from miles.trainer.protocol import Example, StepStats, TensorShard
from miles.trainer.reference_model import ReferenceModel
from miles.trainer.rl_batch import prepare, sampled_sequences
from miles.trainer.schedule import learning_rate
from miles.trainer.scoring import score
from miles.trainer.sequences import TokenSequence
from miles.trainer.shards import iter_shards
from miles.trainer.throughput import Stopwatch, speed_metrics

PromptAndResponse = tuple[Sequence[int], Sequence[int]]


class Learner:
    """Needs `torch.distributed` and Megatron's parallel state. Raises ConfigError for a model it cannot load."""

    def __init__(self, options: TrainerOptions) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.counters = Counters()
        self.arch = read_architecture(options.model_path)
        self.place = Place.of(torch.distributed.get_rank(), options.parallel)
        self.device = torch.device("cpu")
        if options.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            model_parallel_cuda_manual_seed(options.seed)
        self.model = build_model(
            self.arch,
            self.place,
            device=self.device,
            dtype=getattr(torch, options.dtype),
            recompute=options.recompute,
        )
        weights.load_hf(dict(self.model.named_parameters()), options.model_path, self.arch, self.place)
        self.wrapped = gradients.with_gradient_buffers(self.model, sharded_optimizer=options.device == "cuda")
        self.optimizer = make_optimizer(self.wrapped, options)
        self.reference: ReferenceModel | None = None
        """The weights that a KL penalty is measured from: those after the warm-up. None until they are needed."""
        self._checkpoint_writer = CheckpointWriter(options.call_timeout_s)
        self._objective = Objective(options.algorithm)
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._cp_group = parallel_state.get_context_parallel_group()

    def step(self, batch: Batch) -> StepStats:
        """One RL step. Counts as a step also where it changed nothing: see `_update`.

        Raises ValueError when `batch` is not for the next step.
        """
        watch = self._stopwatch()
        if batch.step != self.counters.steps + 1:
            raise ValueError(f"a batch for step {batch.step}, but the next step is {self.counters.steps + 1}")
        algorithm = self.options.algorithm
        reference = None
        if algorithm.kl is not None:
            with watch.phase("reference"), self._made_reference().in_place(self.model):
                reference = self._score(sampled_sequences(batch))
        with watch.phase("advantage"):
            prepared = prepare(batch, algorithm, reference)
        head = TrainingHead(
            self._token_logprobs(self.options.temperature),
            self._objective,
            sampled=True,
            entropy_gradient=self._objective.needs_entropy,
        )
        lr = learning_rate(self.options, batch.step)
        metrics = self._update(prepared.sequences, head, lr, watch)
        self.counters = replace(self.counters, steps=batch.step)
        return StepStats(batch.step, prepared.metrics | metrics | watch.metrics())

    def warmup_step(self, examples: Sequence[Example], lr: float) -> StepStats:
        """One supervised step. Its number counts warm-up steps. The reference is then the model after it."""
        watch = self._stopwatch()
        used = [example for example in examples if example.completion_ids]
        tokens = sum(len(example.completion_ids) for example in used)
        sequences = [TokenSequence(one.prompt_ids, one.completion_ids, weight=1.0 / tokens) for one in used]
        # Nobody sampled these tokens: they are learned at temperature 1, whatever that of the rollouts.
        head = TrainingHead(self._token_logprobs(1.0), _imitate, sampled=False, entropy_gradient=False)
        metrics = self._update(sequences, head, lr, watch)
        self.reference = None
        self.counters = replace(self.counters, warmup_steps=self.counters.warmup_steps + 1)
        return StepStats(self.counters.warmup_steps, metrics | watch.metrics())

    def logprobs(self, sequences: Sequence[PromptAndResponse]) -> list[list[float]]:
        """Logprob of each response token, temperature applied; [] for an empty response. The same on every rank."""
        return self._score([TokenSequence(prompt, response) if response else None for prompt, response in sequences])

    def shards(self) -> Iterator[TensorShard]:
        """Live views of this rank's parameters as boxes of the Hugging Face tensors."""
        return iter_shards(dict(self.model.named_parameters()), self.arch, self.place)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective over all ranks."""
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """Copy everything that a checkpoint holds; a thread writes it while training goes on. A collective."""
        state = checkpoint.state_to_save(self.model, self.optimizer, self.counters, self._reference_weights())
        self._checkpoint_writer.begin(folder, state)

    def finish_save(self) -> None:
        """Return once the checkpoint begun last is in its place. Callable from another thread than all else."""
        self._checkpoint_writer.wait()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place: views handed out by `shards` stay valid."""
        self.finish_save()
        self.counters = checkpoint.load(folder, self.model, self.optimizer, self._reference_weights())

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder from rank 0; collective over all ranks."""
        parameters = dict(self.model.named_parameters())
        weights.export_hf(parameters, self.arch, self.options.model_path, folder, self.place)

    def _update(
        self, sequences: Sequence[TokenSequence], head: TrainingHead, lr: float, watch: Stopwatch
    ) -> dict[str, float]:
        """Forward, backward and optimizer step over all ranks; the metrics, means over trained tokens.

        Changes nothing, and says `skipped`, without trained tokens, where the loss or the gradient is not finite, or
        where the gradient's norm is above `skip_grad_norm`.
        """
        options = self.options
        trained = sum(sequence.trained for sequence in sequences)
        metrics = {"tokens": float(sum(len(sequence.response_ids) for sequence in sequences)), "lr": lr}
        metrics |= {"tokens_trained": float(trained), "loss": 0.0, "grad_norm": 0.0}
        skipped = not trained
        if trained:
            with watch.phase("forward_backward"):
                gradients.clear(self.wrapped)
                micros = pack(sequences, options.micro_batch_tokens, self.place, self.device)
                forward_backward(self.wrapped, micros, head)
                gradients.finalize(self.wrapped)
                sums, maxima = head.tally.totals(self.place)
            with watch.phase("optimizer"):
                largest = math.inf if options.skip_grad_norm is None else options.skip_grad_norm
                # All ranks have the same sum, so they agree.
                usable = math.isfinite(sums["loss"])
                outcome = self.optimizer.apply(lr, options.clip_grad, largest_norm=largest if usable else -math.inf)
            skipped = outcome.skipped
            metrics |= _token_means(sums, trained) | maxima | {"grad_norm": outcome.grad_norm}
            metrics |= self._speed(sequences, watch)
        self.counters = replace(self.counters, skipped_steps=self.counters.skipped_steps + skipped)
        return metrics | {"skipped": float(skipped), "skipped_steps": float(self.counters.skipped_steps)}

    def _score(self, sequences: Sequence[TokenSequence | None]) -> list[list[float]]:
        """Logprobs of all trained tokens, by sequence, [] for None; the same on every rank. A collective."""
        filled = [sequence for sequence in sequences if sequence is not None]
        micros = pack(filled, self.options.micro_batch_tokens, self.place, self.device)
        values = iter(score(self.wrapped, filled, micros, self._token_logprobs(self.options.temperature)))
        return [[] if sequence is None else next(values) for sequence in sequences]

    def _token_logprobs(self, temperature: float) -> TokenLogprobs:
        return TokenLogprobs(self.arch.vocab, temperature, self._tp_group, self._cp_group)

    def _made_reference(self) -> ReferenceModel:
        if self.reference is None:
            self.reference = ReferenceModel(self.model)
        return self.reference

    def _reference_weights(self) -> dict[str, Tensor] | None:
        """What a checkpoint holds of the reference; None where nothing is measured from one."""
        return None if self.options.algorithm.kl is None else self._made_reference().weights

    def _speed(self, sequences: Sequence[TokenSequence], watch: Stopwatch) -> dict[str, float]:
        seconds = watch.seconds("forward_backward") + watch.seconds("optimizer")
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return speed_metrics(self.arch, sequences, seconds, self.place.sizes.world_size, name)

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(torch.cuda.synchronize if self.device.type == "cuda" else _idle)


def _token_means(sums: dict[str, float], tokens: int) -> dict[str, float]:
    """Means over all trained tokens; those of one staleness over the tokens of that staleness. The loss is a sum."""
    means = {}
    for name, value in sums.items():
        if name == "loss":
            means[name] = value
        elif name.startswith("logprob_diff_stale_"):
            means[name] = value / sums[name.replace("logprob_diff", "tokens")]
        elif not name.startswith("tokens_stale_"):
            means[name] = value / tokens
    return means


def _imitate(tokens: TrainedTokens) -> TokenLoss:
    return supervised(tokens, tokens.behaviour)


def _idle() -> None:
    """A CPU has done its work when a call returns."""
