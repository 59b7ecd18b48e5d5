"""Two ranks that share a model and a batch compute what one plain PyTorch loop over transformers computes, in fp32.

Logits, logprobs, gradients, loss and gradient norm of packed sequences in several micro-batches, and parameters after
three optimizer steps with clipping at work. Every rank's every box is compared, so replicas agree too. Differences
are near 1e-6; test_parallel_controls shows that each kind of mistake is far outside the tolerance.
"""

import pytest

from tests.miles.trainer import rank_calls
from tests.miles.trainer.parallel_checks import BATCHES, DP, EP, PP, TP, TP_SP, Models, check, with_sizes
from tests.support.ranks import Ranks

pytestmark = pytest.mark.real

CASES = {
    "qwen3-tp": ("qwen3", True, TP),
    "qwen3-tp-sp": ("qwen3", True, TP_SP),
    "qwen3-pp-tied": ("qwen3", True, PP),
    "qwen3-pp-untied": ("qwen3", False, PP),
    "qwen3-dp": ("qwen3", True, DP),
    "qwen2-tp": ("qwen2", True, TP),
    "qwen2-tp-sp": ("qwen2", False, TP_SP),
    "qwen2-pp": ("qwen2", True, PP),
    "qwen2-dp": ("qwen2", False, DP),
    "llama-tp": ("llama3", False, TP),
    "llama-tp-sp": ("llama", True, TP_SP),
    "llama-pp": ("llama3", True, PP),
    "llama-dp": ("llama", True, DP),
    "gemma-tp": ("gemma", True, TP),
    "gemma-tp-sp": ("gemma", True, TP_SP),
    "gemma-pp": ("gemma", True, PP),
    "gemma-dp": ("gemma", True, DP),
    "moe-ep": ("qwen3_moe", False, EP),
    "moe-dp": ("qwen3_moe", False, DP),
    "moe-tp-sp": ("qwen3_moe", False, TP_SP),
    "moe-pp": ("qwen3_moe", True, PP),
}
"""Every architecture along every dimension. Experts under tensor parallelism need sequence parallelism."""


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_a_plain_loop(pair: Ranks, models: Models, case: str) -> None:
    kind, tied, sizes = CASES[case]
    options, plain = models.of(kind, tied)
    check(pair.run_as(sizes, rank_calls.run_learner, with_sizes(options, sizes), BATCHES), options, plain, sizes)
