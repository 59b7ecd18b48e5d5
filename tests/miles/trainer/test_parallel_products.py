"""Four ranks: products of two dimensions equal the plain loop too. See test_parallel."""

from collections.abc import Iterator

import pytest

from miles.trainer.parallel import ParallelSizes
from tests.miles.trainer import rank_calls
from tests.miles.trainer.parallel_checks import BATCHES, Models, check, with_sizes
from tests.support.ranks import Ranks, ranks

pytestmark = pytest.mark.real

CASES = {
    "tp-sp-pp": ("qwen3", True, ParallelSizes(tensor=2, sequence=True, pipeline=2)),
    "tp-dp": ("qwen3", True, ParallelSizes(tensor=2, data=2)),
    "pp-dp": ("llama", False, ParallelSizes(pipeline=2, data=2)),
    "moe-tp-sp-ep": ("qwen3_moe", False, ParallelSizes(tensor=2, sequence=True, data=2, expert=2)),
    "moe-pp-ep": ("qwen3_moe", True, ParallelSizes(pipeline=2, data=2, expert=2)),
    "moe-ep-of-4-dp": ("qwen3_moe", False, ParallelSizes(data=4, expert=2)),
}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks(4) as group:
        yield group


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_equal_a_plain_loop(four: Ranks, models: Models, case: str) -> None:
    kind, tied, sizes = CASES[case]
    options, plain = models.of(kind, tied)
    check(four.run_as(sizes, rank_calls.run_learner, with_sizes(options, sizes), BATCHES), options, plain, sizes)
