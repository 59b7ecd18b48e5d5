"""docs/metrics.md describes each name once, those that losses and corrections bring included.

A real run is held against it in tests/chaos/test_debug_runs.py.
"""

from __future__ import annotations

import pytest
import torch

from miles.algorithms import registry
from miles.algorithms.objective import Objective
from miles.algorithms.options import AlgorithmOptions, CorrectionOptions, KlOptions
from miles.algorithms.tokens import TrainedTokens
from miles.telemetry.step_panels import PANELS
from tests.support.metrics_page import always, documented, undocumented

TOKENS = TrainedTokens(
    logprobs=torch.tensor([-1.0, -0.5], requires_grad=True),
    behaviour=torch.tensor([-1.1, -0.6]),
    advantages=torch.tensor([1.0, -1.0]),
    sequence=torch.tensor([0, 1]),
    sequences=2,
    reference=torch.tensor([-0.9, -0.7]),
    entropy=torch.tensor([0.5, 0.6]),
    staleness=torch.tensor([0, 1]),
)


def test_the_page_has_names_and_tells_those_of_every_line() -> None:
    assert {"step", "reward", "grad_norm", "response_length_max", "train_call_s"} <= always()
    assert "kl" in documented() and "kl" not in always()
    assert undocumented(["staleness_3", "staleness_<k>", "colour"]) == {"staleness_<k>", "colour"}


def test_displays_draw_what_is_described() -> None:
    assert not undocumented(name for panel in PANELS for name in panel.names)


@pytest.mark.parametrize("loss", registry.LOSSES)
@pytest.mark.parametrize("correction", [None, *registry.CORRECTIONS])
def test_what_losses_and_corrections_bring_is_described(loss: str, correction: str | None) -> None:
    """Fails for a metric of an objective that nobody described."""
    options = AlgorithmOptions(
        loss=loss,
        loss_options={"dual_clip": 3.0} if loss == "clipped" else {},
        correction=None if correction is None else CorrectionOptions(correction),
        kl=KlOptions(0.1),
    )
    result = Objective(options)(TOKENS)
    assert not undocumented({**result.metrics, **result.maxima})
