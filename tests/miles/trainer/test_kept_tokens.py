"""Log-probabilities within the tokens that sampling kept, against the definition in float64."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from executors.sampling_record import KeptTokens, Routing
from executors.trajectory import StopReason, Trajectory, VersionSpan
from miles.trainer import kept_tokens
from miles.trainer.fused_logprobs import linear_logprobs
from miles.trainer.kept_tokens import KeptRows, kept_logprobs, kept_rows
from miles.trainer.parallel import ParallelSizes
from miles.trainer.rollout_metrics import rollout_metrics
from miles.trainer.sequences import TokenSequence
from tests.support.metrics_page import undocumented
from tests.support.ranks import ranks

pytestmark = pytest.mark.usefixtures("megatron")

VOCAB = 23
HIDDEN = 8
TOLERANCE = 1e-5
SETS = [[3, 4, 22], [], [7], list(range(VOCAB)), [0, 12], []]
TARGETS = [22, 5, 7, 11, 12, 0]


def tensor_group() -> Any:
    """The tensor-parallel group this process is in."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def recorded(sets: list[list[int]]) -> KeptTokens:
    return KeptTokens(array("i", map(len, sets)).tobytes(), array("i", [i for ids in sets for i in ids]).tobytes())


def rows_of(sets: list[list[int]]) -> KeptRows:
    made = kept_rows([TokenSequence([1], TARGETS, kept=recorded(sets))])
    assert made is not None
    return made


def inputs(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(len(TARGETS), HIDDEN, generator=generator) * scale
    return hidden.requires_grad_(), torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_()


def by_definition(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden.double() @ weight.double().t() / temperature
    values = []
    for row, ids, target in zip(logits, SETS, TARGETS, strict=True):
        values.append(row[target] - (row[ids] if ids else row).logsumexp(0))
    return torch.stack(values)


def ours(hidden: Tensor, weight: Tensor, temperature: float, *, group: Any, rank: int = 0, size: int = 1) -> Tensor:
    """With weights cut over `size` ranks, of which this is `rank`; padded to an equal number of rows."""
    width = -(-VOCAB // size)
    padded = torch.cat((weight, torch.full((width * size - VOCAB, HIDDEN), 9.0)))
    part = padded[rank * width : (rank + 1) * width]
    targets = torch.tensor(TARGETS)
    full, _ = linear_logprobs(hidden, part, targets, vocab=VOCAB, temperature=temperature, tp_group=group)
    return kept_logprobs(hidden, part, targets, full, rows_of(SETS), temperature=temperature, tp_group=group)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize("pairs", [65536, 4])
def test_value_and_gradient(temperature: float, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "PAIRS", pairs)
    check(*gradients(lambda h, w: ours(h, w, temperature, group=tensor_group())), temperature)


def test_huge_logits_stay_finite() -> None:
    check(*gradients(lambda h, w: ours(h, w, 1.0, group=tensor_group()), scale=300.0), 1.0, scale=300.0, relative=True)


def gradients(function: Any, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = inputs(scale)
    values = function(hidden, weight)
    torch.autograd.backward((values * torch.arange(1, len(TARGETS) + 1)).sum())
    assert hidden.grad is not None and weight.grad is not None
    return values.detach(), hidden.grad, weight.grad


def check(
    values: Tensor,
    of_hidden: Tensor,
    of_weight: Tensor,
    temperature: float,
    *,
    scale: float = 1.0,
    relative: bool = False,
) -> None:
    wanted = gradients(lambda h, w: by_definition(h, w, temperature), scale)
    for mine, other in zip((values, of_hidden, of_weight), wanted, strict=True):
        tolerance = TOLERANCE * (1 + float(other.abs().max())) if relative else TOLERANCE
        assert torch.isfinite(mine).all()
        assert float((mine - other).abs().max()) < tolerance


def test_sets_are_those_of_trained_tokens_only() -> None:
    """Fails when the mask of the response is not applied to the sets."""
    masked = TokenSequence([1, 2], [5, 6, 7], mask=[True, False, True], kept=recorded([[5, 1], [6, 3, 4], [7]]))
    plain = TokenSequence([1], [8, 9])
    made = kept_rows([plain, masked])
    assert made is not None
    assert made.rows.tolist() == [2, 2, 3] and made.ids.tolist() == [5, 1, 7]
    assert made.recorded.tolist() == [False, False, True, True]
    assert kept_rows([plain]) is None


def test_numbers_about_what_engines_told() -> None:
    spans = (VersionSpan(1, 0, 2, "e0"),)
    plain = Trajectory((1, 2), (3, 4), (-1.0, -1.0), spans, StopReason.STOP, 1.0)
    routing = Routing(array("h", [0, 1, -1, -1, 3, 2]).tobytes(), 2)
    told = replace(plain, kept=recorded([[3, 5, 6], []]), routing=routing)
    ages, advantages = [[0, 0]] * 2, [[[1.0, 1.0], [1.0, 1.0]]]
    metrics = rollout_metrics([told, plain], ages, advantages)
    assert (metrics["kept_fraction"], metrics["kept_tokens"], metrics["routed_fraction"]) == (1 / 4, 3.0, 2 / 6)
    names = set(rollout_metrics([plain, plain], ages, advantages))
    assert set(metrics) - names == {"kept_fraction", "kept_tokens", "routed_fraction"}
    assert not undocumented(metrics)


def part_of(rank_count: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """On a rank: values, gradient of hidden, and of this rank's rows of the weight within the whole."""
    group = tensor_group()
    return gradients(lambda h, w: ours(h, w, temperature, group=group, rank=group.rank(), size=rank_count))


@pytest.mark.real
def test_over_tensor_parallel_ranks() -> None:
    """Fails when a column of another rank is counted, or the sums and the gradient are not summed over ranks."""
    with ranks(2) as pair:
        first, second = pair.run_as(ParallelSizes(tensor=2), part_of, 2, 0.6)
    for values, of_hidden, _ in (first, second):
        check(values, of_hidden, first[2] + second[2], 0.6)
