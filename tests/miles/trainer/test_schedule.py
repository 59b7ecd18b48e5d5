"""Learning rate and options."""

from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from miles.trainer.optimizer import learning_rate
from miles.trainer.options import TrainerOptions


def test_rate_climbs_then_falls_to_its_final_fraction_and_stays() -> None:
    options = TrainerOptions(Path("model"), lr=3e-4, lr_warmup_steps=10, lr_decay_steps=500, lr_final_fraction=0.1)
    rates = [learning_rate(options, step) for step in range(1, 601)]
    assert rates[0] == pytest.approx(3e-5)
    assert rates[9] == pytest.approx(3e-4) == max(rates)
    assert rates[254] == pytest.approx(3e-4 * (1 - 0.9 * 0.5))
    assert rates[499] == rates[599] == pytest.approx(3e-5)


@pytest.mark.parametrize(("warmup", "decay"), [(0, 1), (5, 5), (10, 3)])
def test_rate_is_sane_for_short_runs(warmup: int, decay: int) -> None:
    options = TrainerOptions(Path("model"), lr=1.0, lr_warmup_steps=warmup, lr_decay_steps=decay)
    assert all(0 < learning_rate(options, step) <= 1.0 for step in range(1, 20))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"temperature": 0.0}, "temperature"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"dtype": "bfloat16"}, "'bfloat16'"),
        ({"tensor_parallel": 2}, "tensor_parallel = 2"),
        ({"clip": (1.5, 0.2)}, "clip"),
    ],
)
def test_options_that_cannot_work_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainerOptions(Path("model"), **change)
