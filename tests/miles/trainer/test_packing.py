"""Packing: every token once, under the budget, each trained token at the row that predicts it."""

import random
from itertools import compress

import pytest

from miles.trainer.packing import MicroBatch, pack
from miles.trainer.parallel import ParallelSizes, Place
from miles.trainer.sequences import TokenSequence

ALONE = Place()


def some_sequences(count: int = 40) -> list[TokenSequence]:
    dice = random.Random(1)
    made = []
    for index in range(count):
        response = [dice.randrange(99) for _ in range(dice.randint(1, 6))]
        mask = [dice.random() < 0.7 for _ in response]
        mask[-1] = True
        made.append(
            TokenSequence(
                [dice.randrange(99) for _ in range(dice.randint(1, 9))],
                response,
                behaviour=[-float(token) for token in response],
                advantages=[float(index + token) for token in response],
                mask=mask if index % 2 else None,
                staleness=[token % 3 for token in response],
                weight=index / 10,
                reference=[-token / 2 for token in response],
            )
        )
    return made


def sequence_starts(micro: MicroBatch) -> list[int]:
    return micro.packed.cu_seqlens_q.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sequence_is_packed_once_under_the_budget(ranks: int) -> None:
    sequences = some_sequences()
    sizes = ParallelSizes(data=ranks)
    packed = [pack(sequences, 50, Place.of(rank, sizes)) for rank in range(ranks)]
    assert {len(micros) for micros in packed} == {len(packed[0])}
    everything = [micro for micros in packed for micro in micros]
    assert sorted(index for micro in everything for index in micro.indices) == list(range(len(sequences)))
    assert all(micro.input_ids.shape[1] <= 50 for micro in everything)


def test_rows_predict_their_targets() -> None:
    sequences = some_sequences()
    for micro in pack(sequences, 50, ALONE):
        starts = sequence_starts(micro)
        offset = 0
        for position, (start, index) in enumerate(zip(starts, micro.indices, strict=False)):
            sequence = sequences[index]
            tokens = [*sequence.prompt_ids, *sequence.response_ids]
            end = offset + sequence.trained
            rows = [row - start for row in micro.rows[offset:end].tolist()]
            assert micro.input_ids[0, start : start + sequence.length].tolist() == tokens[:-1]
            assert micro.position_ids[0, start : start + sequence.length].tolist() == list(range(sequence.length))
            assert [tokens[row + 1] for row in rows] == micro.targets[offset:end].tolist()
            assert micro.sequence[offset:end].tolist() == [position] * sequence.trained
            assert micro.weights[offset:end].tolist() == pytest.approx([sequence.weight] * sequence.trained)
            offset = end
        assert offset == len(micro.rows) == len(micro.sequence)


def test_what_a_token_carries_stays_with_it_and_masked_ones_are_left_out() -> None:
    """Fails when a mask is applied to some of the columns only."""
    sequences = some_sequences()
    for micro in pack(sequences, 50, ALONE):
        chosen = [sequences[index] for index in micro.indices]
        for name, values in {
            "targets": micro.targets,
            "behaviour": micro.behaviour,
            "advantages": micro.advantages,
            "staleness": micro.staleness,
            "reference": micro.reference,
        }.items():
            attribute = "response_ids" if name == "targets" else name
            wanted = [
                value
                for one in chosen
                for value in compress(getattr(one, attribute), one.mask or [True] * len(one.response_ids))
            ]
            assert values is not None and values.tolist() == wanted, name
        assert set(micro.ages) == set(micro.staleness.tolist())


def test_equal_lengths_form_one_run() -> None:
    sequences = [TokenSequence([1] * (1 + index % 3), [2]) for index in range(30)]
    (micro,) = pack(sequences, 1000, ALONE)
    assert micro.packed.runs == ((10, 1), (10, 2), (10, 3))
    assert micro.packed.max_seqlen_q == 3


def test_under_sequence_parallelism_tokens_divide_by_the_ranks() -> None:
    sequences = [TokenSequence([1] * 4, [2]), TokenSequence([3], [4])]
    place = Place.of(0, ParallelSizes(tensor=4, sequence=True))
    (micro,) = pack(sequences, 1000, place)
    assert micro.input_ids.shape == micro.position_ids.shape == (1, 8)
    assert micro.packed.runs == ((1, 1), (1, 4), (1, 3))
    assert micro.rows.tolist() == [0, 4] and micro.lengths == (1, 4)


def test_a_rank_without_a_sequence_keeps_in_step_with_a_token_that_does_not_count() -> None:
    sizes = ParallelSizes(data=2)
    (one,), (other,) = (pack([TokenSequence([1], [2])], 8, Place.of(rank, sizes)) for rank in range(2))
    assert not one.is_filler and other.is_filler
    assert other.weights.tolist() == [0.0] and other.indices == ()


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    micros = pack([TokenSequence([1] * 30, [2]), TokenSequence([1], [2])], 8, ALONE)
    assert [micro.indices for micro in micros] == [(0,), (1,)]


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 8, ALONE) == []


@pytest.mark.parametrize(("prompt", "response"), [([], [1]), ([1], [])])
def test_empty_parts_are_refused(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token each"):
        TokenSequence(prompt, response)
