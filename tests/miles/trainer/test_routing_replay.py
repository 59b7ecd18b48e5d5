"""Rollout routing replay: the experts that the engine chose, the weights and gradients of the trainer.

The engine here is transformers with other weights than the trainer's, so that it chooses other experts; the reference
is transformers with the trainer's weights and its choice of experts overruled.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executors.sampling_record import Routing
from miles.trainer import weights
from miles.trainer.architecture import read_architecture
from miles.trainer.attention import pack_params
from miles.trainer.cpu_compat import running_on_cpu
from miles.trainer.heads import TokenLogprobs
from miles.trainer.layout import ALONE
from miles.trainer.model import build_model
from miles.trainer.packing import pack
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.routing_replay import recorded_experts
from miles.trainer.scoring import score
from miles.trainer.sequences import TokenSequence
from tests.miles.trainer.tiny import EXPERTS, VOCAB, learner, reference, write_model
from tests.support.ranks import ranks

pytestmark = pytest.mark.usefixtures("megatron")

TOLERANCE = 1e-5
LENGTHS = [1, 7, 7, 21]
TOP_K = EXPERTS["num_experts_per_tok"]


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", tied=False)
    config = made / "config.json"
    text = config.read_text()
    assert '"norm_topk_prob": true' in text
    config.write_text(text if request.param else text.replace('"norm_topk_prob": true', '"norm_topk_prob": false'))
    return made


@pytest.fixture(scope="module")
def engine_routing(folder: Path) -> Tensor:
    """[t, layers, top_k], by weights that have drifted from the trainer's."""
    engine = reference(folder)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return routing_of(engine)


def routing_of(model: Any) -> Tensor:
    """The experts that a transformers model chooses."""
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out, into=into: into.append(out[2]))
        for layer, into in zip(model.model.layers, seen, strict=True)
    ]
    with torch.no_grad():
        for row in rows():
            model(row[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(parts) for parts in seen], 1)


@contextmanager
def overruled(model: Any, routing: Tensor) -> Iterator[None]:
    """Make a transformers model use these experts, with its own weights of them; -1 leaves the choice to it."""

    def gate_of(gate: Any, experts: list[Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        upcoming = iter(experts)

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden, gate.weight)
            scores = logits.softmax(-1)
            forced = next(upcoming)
            chosen = torch.where(forced < 0, scores.topk(TOP_K).indices, forced)
            values = scores.gather(1, chosen)
            return logits, values / values.sum(-1, keepdim=True) if gate.norm_topk_prob else values, chosen

        return forward

    parts = torch.split(routing, LENGTHS)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = gate_of(layer.mlp.gate, [part[:, index] for part in parts])
    yield
    for layer in model.model.layers:
        del layer.mlp.gate.forward


def model_of(folder: Path, place: Place = ALONE) -> Any:
    arch = read_architecture(folder)
    model = build_model(arch, place)
    weights.load_hf(dict(model.named_parameters()), folder, arch, place)
    return model


def ours(model: Any, routing: Tensor | None) -> Tensor:
    """Logits [t, vocab / tp] of the packed sequences."""
    packed = pack_params(LENGTHS, torch.device("cpu"))
    packed.routing = None if routing is None else routing.flatten(1).to(torch.int16)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with running_on_cpu():
        logits: Tensor = model(torch.cat(rows())[None], positions, None, packed_seq_params=packed)[0]
    return logits


def theirs(model: Any) -> Tensor:
    return torch.cat([model(row[None]).logits[0] for row in rows()])


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def test_of_the_same_weights_nothing_changes(folder: Path) -> None:
    model, other = model_of(folder), reference(folder)
    own = routing_of(other)
    assert difference(ours(model, own), theirs(other)) < TOLERANCE
    assert difference(ours(model, None), theirs(other)) < TOLERANCE


def test_the_engines_experts_are_used_with_the_trainers_weights_of_them(folder: Path, engine_routing: Tensor) -> None:
    """The second line is the control: without a replay other experts are used, and it shows."""
    model, other = model_of(folder), reference(folder)
    assert (engine_routing.sort(-1).values != routing_of(other).sort(-1).values).any()
    free = theirs(other)
    with overruled(other, engine_routing):
        forced = theirs(other)
    assert difference(free, forced) > 0.01
    assert difference(ours(model, engine_routing), forced) < TOLERANCE
    assert difference(ours(model, None), free) < TOLERANCE


def test_gradients_flow_through_the_weights_of_the_recorded_experts(folder: Path, engine_routing: Tensor) -> None:
    model, other = model_of(folder), reference(folder)
    targets = torch.cat(rows()).roll(-1)
    with overruled(other, engine_routing):
        logits = theirs(other)
    for values in (ours(model, engine_routing), logits):
        torch.autograd.backward(torch.nn.functional.cross_entropy(values, targets))
    arch = read_architecture(folder)
    gradients = dict(weights.global_tensors({name: p.grad for name, p in model.named_parameters()}, arch))
    wanted = by_expert({name: p.grad for name, p in other.named_parameters()})
    assert set(gradients) == set(wanted)
    assert max(difference(gradients[name], wanted[name]) for name in wanted) < TOLERANCE
    gates = [gradient for name, gradient in wanted.items() if name.endswith("mlp.gate.weight")]
    assert min(float(gradient.abs().max()) for gradient in gates) > 100 * TOLERANCE


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers holds the experts of a layer in one tensor; checkpoints have one for each."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith("mlp.experts"):
            found[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            parts = (
                zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
                if last == "gate_up_proj"
                else [(last, expert)]
            )
            found |= {f"{stem}.{index}.{part}.weight": values for part, values in parts}
    return found


def test_tokens_without_a_record_go_where_the_trainer_sends_them(folder: Path, engine_routing: Tensor) -> None:
    """A row that is no choice of different experts is no record either: here an expert twice, and one there is not."""
    model, other = model_of(folder), reference(folder)
    some = engine_routing.clone()
    some[::3] = -1
    broken = some.clone()
    broken[0] = 1
    broken[3, :, 0] = EXPERTS["num_experts"]
    with overruled(other, some):
        wanted = theirs(other)
    assert difference(ours(model, some), wanted) < TOLERANCE
    assert difference(ours(model, broken), wanted) < TOLERANCE


def test_a_record_that_does_not_fit_the_model_is_refused(folder: Path, engine_routing: Tensor) -> None:
    model = model_of(folder)
    for broken in (engine_routing[:-1], engine_routing[:, :1], engine_routing[..., :1]):
        with pytest.raises(ValueError, match="routing of"):
            ours(model, broken)


def test_records_are_packed_as_their_tokens_are() -> None:
    """Fails when the record does not follow its sequence to its place, or padding gets one."""
    place = Place(ParallelSizes(tensor=4, sequence=True))

    def sequence(first: int, length: int, *, recorded: bool) -> TokenSequence:
        tokens = list(range(first, first + length))
        routing = Routing(array("h", [x for t in tokens for x in (t, 2 * t)]).tobytes(), 2) if recorded else None
        return TokenSequence(tokens[:1], [*tokens[1:], 0], routing=routing)

    sequences = [sequence(10, 5, recorded=True), sequence(30, 2, recorded=False), sequence(50, 3, recorded=True)]
    (micro,) = pack(sequences, 100, place)
    routing = micro.packed.routing
    assert routing is not None and routing.shape == (12, 2)
    for token, record in zip(micro.input_ids[0].tolist(), routing.tolist(), strict=True):
        assert record == ([token, 2 * token] if token >= 50 or 10 <= token < 20 else [-1, -1])
    assert recorded_experts([None], [0], 3) is None
    with pytest.raises(ValueError, match="different widths"):
        recorded_experts([Routing(b"\0\0", 1), Routing(b"\0\0\0\0", 2)], [0, 1], 2)


def on_rank(folder: Path, sizes: ParallelSizes, routing: Tensor) -> Tensor:
    with torch.no_grad():
        return ours(model_of(folder, Place.of(torch.distributed.get_rank(), sizes)), routing)


def over_stages(folder: Path, routing: Tensor) -> list[list[float]]:
    """Logprobs of all tokens but the first of each sequence that has more than one."""
    from megatron.core import parallel_state

    sizes = ParallelSizes(pipeline=2)
    trained = learner(folder, parallel=sizes)
    sequences = [
        TokenSequence(
            row[:1].tolist(), row[1:].tolist(), routing=Routing(part[:-1].short().numpy().tobytes(), 2 * TOP_K)
        )
        for row, part in zip(rows(), torch.split(routing, LENGTHS), strict=True)
        if len(row) > 1
    ]
    micros = pack(sequences, 8, trained.place)
    assert len(micros) > 1
    return score(
        trained.wrapped, sequences, micros, TokenLogprobs(VOCAB, 1.0, parallel_state.get_tensor_model_parallel_group())
    )


@pytest.mark.real
def test_over_ranks(folder: Path, engine_routing: Tensor) -> None:
    """Fails when a rank under sequence parallelism takes the record of all tokens, or of another rank's, or when a
    pipeline stage takes the record of its first layer for that of the model's, or of another micro-batch."""
    other = reference(folder)
    with overruled(other, engine_routing):
        wanted = theirs(other)
    with ranks(2) as pair:
        sizes = ParallelSizes(tensor=2, sequence=True)
        split = pair.run_as(sizes, on_rank, folder, sizes, engine_routing)
        assert difference(torch.cat(split, -1)[:, :VOCAB], wanted) < TOLERANCE
        sizes = ParallelSizes(data=2, expert=2)
        for logits in pair.run_as(sizes, on_rank, folder, sizes, engine_routing):
            assert difference(logits, wanted) < TOLERANCE
        for scored in pair.run_as(ParallelSizes(pipeline=2), over_stages, folder, engine_routing):
            parts = [part for part in zip(rows(), torch.split(wanted, LENGTHS), strict=True) if len(part[0]) > 1]
            for found, (row, logits) in zip(scored, parts, strict=True):
                logprobs = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
                assert difference(torch.tensor(found), logprobs) < TOLERANCE
