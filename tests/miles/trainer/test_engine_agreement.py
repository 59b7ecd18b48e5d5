"""O07: a real engine and a real trainer with the same weights mean the same by a log-probability.

Samples come from an embedded engine's process over HTTP, as in a run, and go into a training step: whatever the
sampling settings, the ratio that the loss sees is 1.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from executors.generation_stream import GenerationStream
from executors.sampling_client import GenerateRequest, SamplingParams
from executors.trajectory import StopReason, Trajectory
from miles.algorithms.options import AlgorithmOptions, KlOptions
from miles.engines.commands import EmbeddedCommand
from miles.engines.sglang_client import SGLangClient
from tests.miles.trainer.tiny import VOCAB, batch_of, learner, write_model
from tests.support.embedded_server import RunningServer, running

pytestmark = [pytest.mark.usefixtures("megatron"), pytest.mark.real]

PROMPTS = [(3,), (5, 6, 7), (9, 8, 7, 6, 5, 4)]
SAMPLES = 4
LABEL = "e0:1"
CUTS = {
    "whole": SamplingParams(12),
    "top_p": SamplingParams(12, top_p=0.8, return_sampling_mask=True),
    "top_k": SamplingParams(12, top_k=5, return_sampling_mask=True),
    "both": SamplingParams(12, top_p=0.8, top_k=5, return_sampling_mask=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("agreement") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RunningServer]:
    with running(EmbeddedCommand(model, LABEL, 16, 1, args={"load_format": "auto"})) as server:
        yield server


async def samples(url: str, sampling: SamplingParams) -> list[list[Trajectory]]:
    """Groups of finished samples, with rewards that differ."""
    async with SGLangClient() as client:
        groups = []
        for place, prompt in enumerate(PROMPTS):
            groups.append([await sample(client, url, prompt, f"r{place}{i:03d}", sampling) for i in range(SAMPLES)])
        return [[replace(one, reward=float(i)) for i, one in enumerate(group)] for group in groups]


async def sample(
    client: SGLangClient, url: str, prompt: tuple[int, ...], name: str, sampling: SamplingParams
) -> Trajectory:
    stream = GenerationStream(prompt, sampling.max_new_tokens, ())
    stream.begin_attempt(1)
    async for chunk in client.generate(url, GenerateRequest(name, prompt, sampling, LABEL)):
        stream.append(chunk)
    assert stream.end_attempt("e0", [])
    return stream.trajectory(StopReason.LENGTH)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_the_ratio_is_one(model: Path, engine: RunningServer, temperature: float, cut: str) -> None:
    """The last lines are the control: without the kept sets the trainer's distribution is another one."""
    groups = await samples(engine.url, replace(CUTS[cut], temperature=temperature))
    trained = learner(model, temperature=temperature)
    metrics = trained.step(batch_of(1, *groups)).metrics
    assert metrics["tokens_trained"] == len(PROMPTS) * SAMPLES * 12
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["logprob_diff_max"] < 1e-4
    assert metrics["clip_fraction"] == 0.0
    if cut == "whole":
        assert all(one.kept is None for group in groups for one in group)
        return
    forgotten = [[replace(one, kept=None) for one in group] for group in groups]
    assert learner(model, temperature=temperature).step(batch_of(1, *forgotten)).metrics["logprob_diff_max"] > 0.05


async def test_greedy_samples_kept_one_token(model: Path, engine: RunningServer) -> None:
    """A set of one has logprob 0 on both sides, and nothing to learn."""
    (group, *_) = await samples(engine.url, replace(CUTS["both"], temperature=0.0))
    kept = group[0].kept
    assert kept is not None and len(kept.ids) == 4 * 12 and set(group[0].logprobs) == {0.0}
    metrics = learner(model).step(batch_of(1, group)).metrics
    assert metrics["logprob_diff_max"] == 0.0 and metrics["grad_norm"] < 1e-6


@pytest.mark.parametrize("place", ["loss", "reward"])
async def test_the_reference_is_measured_within_the_same_sets(model: Path, engine: RunningServer, place: str) -> None:
    """Fails when the reference's logprobs are over the whole vocabulary: the KL of equal models would not be 0."""
    groups = await samples(engine.url, CUTS["both"])
    kl = KlOptions(1.0, "k2", "reward" if place == "reward" else "loss", "estimator")
    options = AlgorithmOptions(kl=kl)
    metrics = learner(model, algorithm=options).step(batch_of(1, *groups)).metrics
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


async def test_a_token_of_the_vocabularys_end_can_be_kept(engine: RunningServer) -> None:
    (group, *_) = await samples(engine.url, SamplingParams(12, top_k=VOCAB, return_sampling_mask=True))
    kept = group[0].kept
    assert kept is not None and len(kept.ids) == 4 * 12 * VOCAB
