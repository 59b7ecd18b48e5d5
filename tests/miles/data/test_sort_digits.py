"""sort_digits: what a prompt is, what is held out, and that everything follows from the seed."""

from __future__ import annotations

import pytest

from controllers.errors import ConfigError
from miles.data.registry import check_source, open_source
from miles.data.source import DataSource
from tests.fakes.byte_encoder import ByteEncoder


def _source(seed: int = 0, **options: object) -> DataSource:
    return open_source("sort_digits", tokenizer=ByteEncoder(), seed=seed, options=options)


def _take(source: DataSource, count: int, *, start: int = 0) -> list[str]:
    prompts = source.train(start=start)
    return [prompt.text for _ in range(count) if (prompt := prompts.next()) is not None]


def test_a_prompt_is_digits_and_its_label_the_same_digits_in_order() -> None:
    prompts = _source(digits=5).train()
    for index in range(20):
        prompt = prompts.next()
        assert prompt is not None
        assert prompt.index == index
        assert prompt.text[:5].isdigit() and prompt.text[5:] == "="
        assert prompt.label == "".join(sorted(prompt.text[:5]))
        assert bytes(prompt.ids).decode() == prompt.text


def test_prompts_follow_from_the_seed() -> None:
    assert _take(_source(seed=3), 50) == _take(_source(seed=3), 50)
    assert _take(_source(seed=3), 50) != _take(_source(seed=4), 50)


def test_a_source_that_starts_later_goes_on_as_if_it_had_never_stopped() -> None:
    whole = _take(_source(), 30)
    assert _take(_source(), 10, start=20) == whole[20:]
    prompts = _source().train(start=7)
    assert prompts.position == 7
    prompt = prompts.next()
    assert prompt is not None and (prompt.index, prompt.text) == (7, whole[7])
    assert prompts.position == 8
    with pytest.raises(ValueError, match="at least 0"):
        _source().train(start=-1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_prompts_are_never_trained_or_warmed_up_on(seed: int) -> None:
    """Fails when `_draw` of sort_digits does not reject held-out digits: with 2 digits all 100 come up."""
    source = _source(seed=seed, digits=2)
    held_out = {prompt.text for prompt in source.evaluation(100)}
    warmup = {bytes(ids).decode() for step in range(20) for ids, _ in source.warmup_examples(50, step)}
    assert held_out and len(warmup) + len(held_out) == 100
    assert not held_out & (set(_take(source, 1000)) | warmup)


def test_about_a_tenth_of_all_prompts_is_held_out_and_each_comes_once() -> None:
    prompts = _source().evaluation(10**5)
    assert 850 < len(prompts) < 1150
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))


def test_a_smaller_evaluation_is_the_beginning_of_a_larger_one() -> None:
    assert _source().evaluation(200)[:5] == _source().evaluation(5)


def test_warmup_examples_end_with_the_end_of_sequence_and_differ_between_steps() -> None:
    source = _source()
    first = source.warmup_examples(64, 0)
    assert len(first) == 64 and first == _source().warmup_examples(64, 0) != source.warmup_examples(64, 1)
    for prompt_ids, answer_ids in first:
        assert bytes(answer_ids[:-1]) == bytes(sorted(prompt_ids[:-1]))
        assert answer_ids[-1] == ByteEncoder.eos_ids[0]


def test_examples_longer_than_the_context_are_passed_over() -> None:
    assert len(_source().warmup_examples(8, 0, max_tokens=10)) == 8
    assert _source().warmup_examples(8, 0, max_tokens=9) == []


def test_sixty_digits_need_no_table() -> None:
    assert len(_source(digits=60).evaluation(200)) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digts": 4}, r"data\.options\.digts: unknown key; did you mean 'digits'\?"),
        ({"digits": 1}, r"data\.options\.digits: .*not 1$"),
        ({"digits": "four"}, r"data\.options\.digits: .*not 'four'$"),
    ],
)
def test_wrong_options_are_named_and_quoted(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_source("sort_digits", options=options)


def test_a_file_for_a_source_that_reads_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.path: .*prompts\.jsonl"):
        check_source("sort_digits", path="prompts.jsonl")
