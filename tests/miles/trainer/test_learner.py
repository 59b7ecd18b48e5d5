"""Steps of a learner: exact token means, who takes part, what is skipped, what is counted."""

import math
from pathlib import Path

import pytest
import torch

from executors.trajectory import Batch, Trajectory
from miles.trainer.optimizer import PortableFP32Optimizer
from miles.trainer.protocol import Example
from tests.miles.trainer.tiny import batch_of, hf_tensors, learner, random_batch, trajectory, write_model

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def largest_change(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
def test_cutting_the_batch_does_not_change_the_step(model: Path, micro_batch_tokens: int) -> None:
    """O06. Fails when a micro-batch's loss is divided by its own token count."""
    whole, cut = learner(model), learner(model, micro_batch_tokens=micro_batch_tokens)
    batch = random_batch(1)
    one, many = whole.step(batch).metrics, cut.step(batch).metrics
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "kl_behaviour", "tokens"):
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert largest_change(hf_tensors(whole), hf_tensors(cut)) < 1e-5


def test_the_loss_is_the_mean_over_tokens_not_over_samples(model: Path) -> None:
    """O06: 10 tokens of loss a and 2 of loss b."""
    trained = learner(model, micro_batch_tokens=1)
    long, short = [5] * 10, [9] * 2
    per_token = [-sum(values) for values in trained.logprobs([([1], long), ([2], short)])]
    stats = trained.warmup_step([Example((1,), tuple(long)), Example((2,), tuple(short))], lr=1e-4)
    assert stats.metrics["loss"] == pytest.approx(sum(per_token) / 12, rel=1e-5)


def abstaining(extra: list[Trajectory]) -> Batch:
    return batch_of(
        1, [trajectory([1, 2], [3, 4], 1.0), trajectory([1, 2], [5], 0.0), trajectory([1, 2], [6, 7], 0.0), *extra]
    )


@pytest.mark.parametrize(
    "extra",
    [trajectory([1, 2], [8, 9, 10], None), trajectory([1, 2], [8, 9], math.nan), trajectory([1, 2], [], 100.0)],
    ids=["none", "nan", "no-tokens"],
)
def test_samples_that_take_no_part_change_nothing(model: Path, extra: Trajectory) -> None:
    """O05, OpenRLHF#1239. Fails when group_advantages counts such a sample as reward 0 or into the baseline."""
    without, with_extra = learner(model), learner(model)
    plain, more = without.step(abstaining([])).metrics, with_extra.step(abstaining([extra])).metrics
    assert more["tokens"] == plain["tokens"] == 5
    assert more["loss"] == pytest.approx(plain["loss"], abs=1e-7)
    assert largest_change(hf_tensors(without), hf_tensors(with_extra)) == 0.0


def test_an_abstained_sample_does_not_lower_the_mean_reward(model: Path) -> None:
    metrics = learner(model).step(abstaining([trajectory([1, 2], [8], None)])).metrics
    assert metrics["reward"] == pytest.approx(1 / 3)
    assert metrics["abstained"] == 1


def test_a_step_without_rewards_is_skipped_and_counted(model: Path) -> None:
    trained = learner(model)
    before = hf_tensors(trained)
    stats = trained.step(batch_of(1, [trajectory([1], [2], None), trajectory([1], [3], None)]))
    assert stats.step == 1
    assert stats.metrics["skipped_steps"] == 1 and stats.metrics["tokens"] == 0
    assert math.isnan(stats.metrics["reward"])
    assert largest_change(before, hf_tensors(trained)) == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(model: Path, poison: float) -> None:
    """Fails without the isfinite check in optimizer.gradient_factor."""
    trained = learner(model)
    trained.step(random_batch(1))
    before = hf_tensors(trained)
    assert isinstance(trained.optimizer, PortableFP32Optimizer)
    moments = [state["exp_avg"].clone() for state in trained.optimizer.optimizer.state.values()]
    first = trained.model.decoder.final_layernorm.weight
    handle = first.register_hook(lambda gradient: gradient * poison)
    stats = trained.step(random_batch(2))
    handle.remove()
    assert stats.metrics["skipped_steps"] == 1 and not math.isfinite(stats.metrics["grad_norm"])
    assert largest_change(before, hf_tensors(trained)) == 0.0
    after = [state["exp_avg"] for state in trained.optimizer.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    stats = trained.step(random_batch(3))
    assert stats.step == 3 and stats.metrics["skipped_steps"] == 1
    assert largest_change(before, hf_tensors(trained)) > 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_unchanged_weights_have_an_importance_ratio_of_one(model: Path, temperature: float) -> None:
    """O07, the trainer's own side: fails when a step scales its logits otherwise than `logprobs` does."""
    trained = learner(model, temperature=temperature)
    drawn = random_batch(1)
    groups = []
    for group in drawn.groups:
        behaviour = trained.logprobs([(m.prompt_ids, m.response_ids) for m in group.trajectories])
        groups.append(
            [
                trajectory(m.prompt_ids, m.response_ids, m.reward, logprobs)
                for m, logprobs in zip(group.trajectories, behaviour, strict=True)
            ]
        )
    metrics = trained.step(batch_of(1, *groups)).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["clip_fraction"] == 0.0


def test_a_batch_for_another_step_is_refused(model: Path) -> None:
    trained = learner(model)
    with pytest.raises(ValueError, match="a batch for step 2, but the next step is 1"):
        trained.step(random_batch(2))


def test_warmup_lowers_the_loss_and_does_not_count_as_rl(model: Path) -> None:
    trained = learner(model)
    examples = [Example((1, 2, 3), (4, 5, 6)), Example((7, 8), (9,)), Example((7,), ())]
    losses = [trained.warmup_step(examples, 1e-2).metrics["loss"] for _ in range(8)]
    assert losses[-1] < 0.3 * losses[0]
    assert trained.counters.steps == 0 and trained.counters.warmup_steps == 8


def test_shards_are_live_views(model: Path) -> None:
    trained = learner(model)
    kept = list(trained.shards())
    before = [shard.tensor.clone() for shard in kept]
    trained.step(random_batch(1))
    again = list(trained.shards())
    assert any(not torch.equal(a, shard.tensor) for a, shard in zip(before, kept, strict=True))
    assert [(s.name, s.box, s.tensor.data_ptr()) for s in kept] == [(s.name, s.box, s.tensor.data_ptr()) for s in again]


def test_an_empty_response_has_no_logprobs(model: Path) -> None:
    values = learner(model).logprobs([([1], [2, 3]), ([1], []), ([4], [5])])
    assert [len(value) for value in values] == [2, 0, 1]


def test_reinforcement_raises_the_reward(model: Path) -> None:
    """One-token answers, rewarded when below 10: the policy must move there, on-policy, in a few steps."""
    trained = learner(model, lr=1e-2, lr_warmup_steps=1, lr_decay_steps=100)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(1, 26):
        groups = []
        for start in range(4):
            with torch.no_grad():
                logits = trained.model(torch.tensor([[start]]), torch.tensor([[0]]), None)[0, 0]
            logprobs = logits.log_softmax(-1)
            drawn = torch.multinomial(logprobs.exp(), 16, replacement=True, generator=generator).tolist()
            groups.append([trajectory([start], [t], float(t < 10), [float(logprobs[t])]) for t in drawn])
        rewards.append(trained.step(batch_of(step, *groups)).metrics["reward"])
    assert sum(rewards[-3:]) / 3 > 0.8 > 4 * rewards[0], [round(reward, 2) for reward in rewards[::3]]


def test_the_supervised_stage_does_not_see_the_sampling_temperature(model: Path) -> None:
    """Fails when Learner.warmup_step scales supervised logits: it would learn to be right at that temperature only."""
    examples = [Example((1, 2), (3, 4, 5))]
    cool, hot = learner(model), learner(model, temperature=1.7)
    assert hot.warmup_step(examples, 1e-3).metrics["loss"] == cool.warmup_step(examples, 1e-3).metrics["loss"]
