"""Learning rate and options."""

from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ConfigError
from miles.trainer.options import LR_SCHEDULES, TrainerOptions
from miles.trainer.schedule import learning_rate


def test_rate_climbs_then_falls_to_its_final_fraction_and_stays() -> None:
    options = TrainerOptions(Path("model"), lr=3e-4, lr_warmup_steps=10, lr_decay_steps=500, lr_final_fraction=0.1)
    rates = [learning_rate(options, step) for step in range(1, 601)]
    assert rates[0] == pytest.approx(3e-5)
    assert rates[9] == pytest.approx(3e-4) == max(rates)
    assert rates[254] == pytest.approx(3e-4 * (1 - 0.9 * 0.5))
    assert rates[499] == rates[599] == pytest.approx(3e-5)


def test_cosine_lies_above_linear_at_first_and_below_it_later() -> None:
    """Numbers from the formula: a quarter of the way down, (1 + cos(pi / 4)) / 2 of the fall is left."""
    options = TrainerOptions(
        Path("model"), lr=1.0, lr_schedule="cosine", lr_warmup_steps=10, lr_decay_steps=110, lr_final_fraction=0.2
    )
    rates = [learning_rate(options, step) for step in range(1, 121)]
    assert rates[4] == pytest.approx(0.5)
    assert rates[9] == 1.0 == max(rates)
    assert rates[34] == pytest.approx(0.2 + 0.8 * 0.8535533906)
    assert rates[59] == pytest.approx(0.6)
    assert rates[84] == pytest.approx(0.2 + 0.8 * 0.1464466094)
    assert rates[109] == rates[119] == pytest.approx(0.2)


def test_constant_climbs_and_stays() -> None:
    options = TrainerOptions(Path("model"), lr=1.0, lr_schedule="constant", lr_warmup_steps=4, lr_decay_steps=10)
    assert [learning_rate(options, step) for step in (1, 2, 4, 5, 10, 50)] == [0.25, 0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
@pytest.mark.parametrize(("warmup", "decay"), [(0, 1), (5, 5), (10, 3)])
def test_rate_is_sane_for_short_runs(warmup: int, decay: int, schedule: str) -> None:
    options = TrainerOptions(Path("model"), lr=1.0, lr_warmup_steps=warmup, lr_decay_steps=decay, lr_schedule=schedule)
    assert all(0 < learning_rate(options, step) <= 1.0 for step in range(1, 20))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.0}, "lr must be above 0, not 0.0"),
        ({"temperature": 0.0}, "temperature"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"dtype": "bfloat16"}, "'bfloat16'"),
        ({"lr_schedule": "cosin"}, "lr_schedule must be one of linear, cosine, constant, not 'cosin'"),
    ],
)
def test_options_that_cannot_work_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TrainerOptions(Path("model"), **change)
