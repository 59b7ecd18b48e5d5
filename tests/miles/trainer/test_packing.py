"""Packing: every token once, under the budget, each response token at the row that predicts it."""

import random

import pytest

from miles.trainer.packing import MicroBatch, pack
from miles.trainer.sequences import TokenSequence


def some_sequences(count: int = 40) -> list[TokenSequence]:
    dice = random.Random(1)
    return [
        TokenSequence(
            [dice.randrange(99) for _ in range(dice.randint(1, 9))],
            response := [dice.randrange(99) for _ in range(dice.randint(1, 6))],
            [-float(token) for token in response],
            float(index),
        )
        for index in range(count)
    ]


def sequence_starts(micro: MicroBatch) -> list[int]:
    return micro.packed.cu_seqlens_q.tolist()  # type: ignore[no-any-return]


def test_every_sequence_is_packed_once_under_the_budget() -> None:
    sequences = some_sequences()
    micros = list(pack(sequences, 50))
    assert len(micros) > 2
    assert sorted(index for micro in micros for index in micro.indices) == list(range(len(sequences)))
    assert all(micro.input_ids.shape[1] <= 50 for micro in micros)


def test_rows_predict_their_targets() -> None:
    sequences = some_sequences()
    for micro in pack(sequences, 50):
        starts = sequence_starts(micro)
        offset = 0
        for start, index in zip(starts, micro.indices, strict=False):
            sequence = sequences[index]
            tokens = [*sequence.prompt_ids, *sequence.response_ids]
            end = offset + len(sequence.response_ids)
            rows = [row - start for row in micro.rows[offset:end].tolist()]
            assert micro.input_ids[0, start : start + sequence.length].tolist() == tokens[:-1]
            assert micro.position_ids[0, start : start + sequence.length].tolist() == list(range(sequence.length))
            assert [tokens[row + 1] for row in rows] == micro.targets[offset:end].tolist()
            assert micro.targets[offset:end].tolist() == list(sequence.response_ids)
            assert micro.behaviour[offset:end].tolist() == sequence.behaviour
            assert micro.advantages[offset:end].tolist() == [sequence.advantage] * len(sequence.response_ids)
            offset = end
        assert offset == len(micro.rows)


def test_equal_lengths_form_one_run() -> None:
    sequences = [TokenSequence([1] * (1 + index % 3), [2]) for index in range(30)]
    (micro,) = pack(sequences, 1000)
    assert micro.packed.runs == ((10, 1), (10, 2), (10, 3))
    assert micro.packed.max_seqlen_q == 3


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    micros = list(pack([TokenSequence([1] * 30, [2]), TokenSequence([1], [2])], 8))
    assert [micro.indices for micro in micros] == [(1,), (0,)]


def test_nothing_packs_to_nothing() -> None:
    assert list(pack([], 8)) == []


@pytest.mark.parametrize(("prompt", "response"), [([], [1]), ([1], [])])
def test_empty_parts_are_refused(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token each"):
        TokenSequence(prompt, response)
