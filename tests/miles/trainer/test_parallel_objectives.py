"""O06 for what a loss may look at beyond a token: sequences, groups, a reference, entropy, staleness.

Two ranks and small micro-batches against one rank and one micro-batch: the same gradient and the same metrics.
"""

import dataclasses
from pathlib import Path

import pytest

from executors.trajectory import Batch, Group, VersionSpan
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions, OverlongOptions
from miles.trainer.options import TrainerOptions
from tests.miles.trainer import rank_calls
from tests.miles.trainer.parallel_checks import BATCHES, DP, PP, TOLERANCE, TP_SP, largest, untimed, with_sizes
from tests.miles.trainer.tiny import write_model
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("megatron")]

ALGORITHMS = {
    "gspo": AlgorithmOptions(loss="gspo", aggregation="sequence_mean"),
    "dapo": AlgorithmOptions(aggregation="group_token_mean", max_tokens=5, overlong=OverlongOptions(2)),
    "dr-grpo": AlgorithmOptions(advantage="dr_grpo", aggregation="sequence_sum", max_tokens=5),
    "kl-and-entropy": AlgorithmOptions(kl=KlOptions(0.1), entropy_coefficient=0.01),
    "kl-in-reward": AlgorithmOptions(advantage="reinforce_plus_plus", kl=KlOptions(0.1, "k1", "reward")),
    "decoupled": AlgorithmOptions(correction=CorrectionOptions("decoupled", proximal="interpolated")),
}


def with_older_tokens(batch: Batch) -> Batch:
    """The same batch, where the first token of each response was sampled a step earlier than the rest."""

    def aged(group: Group) -> Group:
        members = []
        for one in group.trajectories:
            parts = ((1, 0, 1), (2, 1, len(one.response_ids)))
            spans = tuple(VersionSpan(version, start, end, "e0") for version, start, end in parts if start < end)
            members.append(dataclasses.replace(one, spans=spans))
        return dataclasses.replace(group, trajectories=tuple(members))

    steps = {1: batch.step - 2, 2: batch.step - 1}
    return dataclasses.replace(batch, groups=tuple(map(aged, batch.groups)), version_steps=steps)


STEPS = [with_older_tokens(batch) for batch in BATCHES[:2]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_objective_does_not_see_how_the_batch_was_cut(pair: Ranks, model: Path, name: str) -> None:
    """Two steps, so that a reference differs from the policy in the second."""
    options = TrainerOptions(model, lr=1e-3, lr_warmup_steps=1, algorithm=ALGORITHMS[name])
    whole = rank_calls.run_learner(options, STEPS)
    cut = dataclasses.replace(options, micro_batch_tokens=20)
    for sizes in (DP, PP, TP_SP):
        (run, _) = pair.run_as(sizes, rank_calls.run_learner, with_sizes(cut, sizes), STEPS)
        assert largest(run.gradients, whole.gradients) < TOLERANCE
        for mine, wanted in zip(untimed(run), untimed(whole), strict=True):
            assert mine == pytest.approx(wanted, abs=2e-5, rel=1e-4)
