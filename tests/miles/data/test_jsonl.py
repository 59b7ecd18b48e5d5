"""jsonl: what is read, what is refused and in which words, the order of rows, and what is held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controllers.errors import ConfigError
from executors.trajectory import Prompt
from miles.data.registry import check_source, open_source
from miles.data.source import DataSource
from tests.fakes.byte_encoder import ByteEncoder


def _write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _file(folder: Path, count: int = 200) -> Path:
    return _write(folder / "prompts.jsonl", [{"prompt": f"p{i}", "label": f"l{i}"} for i in range(count)])


def _open(path: Path, *, seed: int = 0, eval_path: Path | None = None, eval_fraction: float = 0.1,
          **options: object) -> DataSource:
    return open_source(
        "jsonl",
        tokenizer=ByteEncoder(),
        seed=seed,
        path=path,
        eval_path=eval_path,
        eval_fraction=eval_fraction,
        options=options,
    )


def _take(source: DataSource, count: int, *, start: int = 0) -> list[Prompt]:
    prompts = source.train(start=start)
    return [prompt for _ in range(count) if (prompt := prompts.next()) is not None]


def test_every_training_row_comes_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    """Fails when `_order` of jsonl ignores the epoch or the seed."""
    source = _open(_file(tmp_path))
    prompts = _take(source, 360)
    first, second = ([p.text for p in prompts[:180]], [p.text for p in prompts[180:]])
    assert len(set(first)) == 180 and set(first) == set(second) and first != second
    assert [p.index for p in prompts] == list(range(360))
    assert all(p.label == p.text.replace("p", "l") and bytes(p.ids).decode() == p.text for p in prompts)
    assert _take(_open(_file(tmp_path)), 360) == prompts
    assert _take(_open(_file(tmp_path), seed=1), 180) != prompts[:180]


def test_resuming_in_the_middle_of_a_later_epoch(tmp_path: Path) -> None:
    whole = _take(_open(_file(tmp_path)), 400)
    assert _take(_open(_file(tmp_path)), 50, start=350) == whole[350:]


def test_limited_epochs_end_and_stay_at_their_end(tmp_path: Path) -> None:
    prompts = _open(_file(tmp_path, 10), epochs=2).train()
    assert sum(prompts.next() is not None for _ in range(30)) == 18
    assert prompts.next() is None and prompts.position == 18


def test_a_prompt_that_stands_there_twice_is_never_on_both_sides(tmp_path: Path) -> None:
    """Fails when rows, not prompts, are divided in `read_rows`."""
    path = _write(tmp_path / "twice.jsonl", [{"prompt": f"p{i % 50}", "label": i} for i in range(200)])
    source = _open(path, eval_fraction=0.3)
    held_out = source.evaluation(1000)
    train = _take(source, 140)
    assert len(held_out) == 60 and len({p.text for p in held_out}) == 15
    assert not {p.text for p in held_out} & {p.text for p in train}
    warmup = {bytes(ids).decode() for step in range(10) for ids, _ in source.warmup_examples(64, step)}
    assert not warmup & {p.text for p in held_out}
    assert {p.label for p in held_out} | {p.label for p in train} == {str(i) for i in range(200)}


def test_evaluation_gives_each_row_once_whatever_the_count(tmp_path: Path) -> None:
    """O17: five held-out prompts are five, also where eight are asked for."""
    path, held_out = _file(tmp_path), _write(tmp_path / "e.jsonl", [{"prompt": f"e{i}", "label": ""} for i in range(5)])
    source = _open(path, eval_path=held_out)
    assert [p.text for p in source.evaluation(8)] == ["e0", "e1", "e2", "e3", "e4"]
    assert len(source.evaluation(3)) == 3
    assert len({p.text for p in _take(source, 200)}) == 200


def test_no_evaluation_where_nothing_is_held_out(tmp_path: Path) -> None:
    source = _open(_file(tmp_path, 1), eval_fraction=0.0)
    assert source.evaluation(10) == [] and len(_take(source, 3)) == 3


def test_prompts_on_both_sides_by_the_persons_own_wish_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _file(tmp_path, 3)
    _open(path, eval_path=path)
    (message,) = caplog.messages
    assert message.startswith("3 prompts are both trained and evaluated")


def test_warmup_examples_are_rows_with_their_labels(tmp_path: Path) -> None:
    source = _open(_file(tmp_path))
    examples = source.warmup_examples(16, 4)
    assert len(examples) == 16 and examples == source.warmup_examples(16, 4) != source.warmup_examples(16, 5)
    for prompt_ids, completion in examples:
        assert bytes(completion[:-1]).decode() == bytes(prompt_ids).decode().replace("p", "l")
        assert completion[-1] == 257


def test_warmup_passes_over_rows_longer_than_the_context(tmp_path: Path) -> None:
    path = _write(tmp_path / "long.jsonl", [{"prompt": "p" * (1 + 99 * (i % 2)), "label": "l"} for i in range(20)])
    source = _open(path, eval_fraction=0.0)
    assert {len(ids) for ids, _ in source.warmup_examples(8, 0, max_tokens=50)} == {1}
    assert source.warmup_examples(8, 0, max_tokens=2) == []


def test_other_fields_go_along_and_numbers_become_text(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.jsonl", [{"prompt": "p", "label": 5, "level": [1, 2], "id": "x"}])
    (prompt,) = _take(_open(path, eval_fraction=0.0), 1)
    assert (prompt.label, prompt.extra) == ("5", {"level": [1, 2], "id": "x"})


def test_fields_under_other_names(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.jsonl", [{"question": "2+2\u2028?", "answer": "4", "prompt": "no"}])
    source = open_source("jsonl", tokenizer=ByteEncoder(), seed=0, path=str(path), prompt_key="question",
                         label_key="answer", eval_fraction=0.0)
    (prompt,) = _take(source, 1)
    assert (prompt.text, prompt.label, prompt.extra) == ("2+2\u2028?", "4", {"prompt": "no"})


BROKEN = [
    (b'{"prompt": "p", "label": ', "not JSON"),
    (b"[1, 2]", "a JSON object is wanted, not [1,2]"),
    (b'{"prompt": 7, "label": "l"}', "'prompt' must be a text that is not empty, not 7"),
    (b'{"prompt": "", "label": "l"}', "'prompt' must be a text that is not empty"),
    (b'{"prompt": "p", "label": null}', "'label' must be a text or a number, not null"),
    (b'{"prompt": "p", "label": true}', "'label' must be a text or a number, not true"),
    (b'{"prompt": "\xff", "label": "l"}', "not JSON"),
]


@pytest.mark.parametrize(("line", "problem"), BROKEN)
def test_a_broken_line_is_reported_with_file_and_number_and_left_out(
    tmp_path: Path, line: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "good", "label": "l"}\r\n\n' + line + b"\n")
    source = _open(path, eval_fraction=0.0)
    assert [p.text for p in _take(source, 2)] == ["good", "good"]
    (message,) = caplog.messages
    assert message.startswith(f"{path}: 1 broken rows are left out: line 3: ") and problem in message


@pytest.mark.parametrize(("line", "problem"), BROKEN)
def test_a_file_of_broken_lines_only_is_refused_with_the_first(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n" + line)
    with pytest.raises(ConfigError) as caught:
        check_source("jsonl", path=path)
    assert caught.value.message.startswith(f"data.path: {str(path)!r} has no valid row: line 2: ")
    assert problem in caught.value.message


def test_faults_of_a_file_name_the_key_and_quote_the_path(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path, problem in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "Is a directory"), (empty, "is empty")):
        with pytest.raises(ConfigError) as caught:
            check_source("jsonl", path=path)
        assert caught.value.key == "data.path" and repr(str(path)) in caught.value.message
        assert problem in caught.value.message
        with pytest.raises(ConfigError, match=r"^data\.eval_path: "):
            check_source("jsonl", path=_file(tmp_path), eval_path=path)
    with pytest.raises(ConfigError, match=r"^data\.path: the jsonl source needs a file"):
        check_source("jsonl")


def test_a_missing_field_names_the_key_the_file_and_the_line(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.jsonl", [{"prompt": "p", "label": "l"}, {"prompt": "p", "lable": "l"}])
    with pytest.raises(ConfigError) as caught:
        check_source("jsonl", path=path)
    assert caught.value.message == f"data.label_key: no 'label' in {str(path)!r}, line 2; did you mean 'lable'?"
    with pytest.raises(ConfigError, match=r"^data\.prompt_key: no 'question' in .*, line 1; known: label, prompt$"):
        check_source("jsonl", path=path, prompt_key="question")


def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.eval_fraction: 0\.1 of 1 different prompts"):
        check_source("jsonl", path=_file(tmp_path, 1))


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.options\.epoch: unknown key; did you mean 'epochs'\?"):
        check_source("jsonl", path=_file(tmp_path), options={"epoch": 2})
