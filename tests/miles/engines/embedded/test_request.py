"""What `/generate` accepts, and what it says when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from miles.engines.embedded.request import Limits, RequestRefused, parse_request

_LIMITS = Limits(vocab_size=100, context_length=32, max_total_tokens=30, eos_token_ids=frozenset({1}))


def _body(**sampling: Any) -> dict[str, Any]:
    return {"input_ids": [5, 6], "sampling_params": sampling}


def test_defaults() -> None:
    call = parse_request({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}, _LIMITS)
    assert (call.prompt, call.max_new_tokens, call.stop_ids) == ([5, 6], 4, frozenset({1}))
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (1.0, 1.0, -1)
    assert (call.stream, call.return_logprob, call.salt) == (False, False, "")
    assert call.rid


def test_stop_tokens_and_ignore_eos() -> None:
    assert parse_request(_body(max_new_tokens=4, stop_token_ids=[7]), _LIMITS).stop_ids == {1, 7}
    assert parse_request(_body(max_new_tokens=4, stop_token_ids=[7], ignore_eos=True), _LIMITS).stop_ids == set()


def test_the_budget_is_clipped_to_the_context() -> None:
    limits = Limits(vocab_size=100, context_length=10, max_total_tokens=100, eos_token_ids=frozenset())
    assert parse_request(_body(max_new_tokens=50), limits).max_new_tokens == 8


def test_both_names_of_the_salt_count() -> None:
    salts = {
        parse_request({**_body(max_new_tokens=4), **names}, _LIMITS).salt
        for names in ({}, {"cache_salt": "a"}, {"extra_key": "b"}, {"cache_salt": "a", "extra_key": "b"})
    }
    assert len(salts) == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "hello"}, "no tokenizer"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [[1, 2]]}, "one request a call"),
        ({"input_ids": [True]}, "list of token ids"),
        ({"input_ids": [5, 100]}, r"outside \[0, 100\)"),
        ({"input_ids": [-1]}, "outside"),
        ({"input_ids": [5] * 32}, "32 tokens.*context of 32"),
        (_body(max_new_tokens=29), "max-total-tokens 30"),
        (_body(max_new_tokens=0), "max_new_tokens=0"),
        (_body(max_new_tokens="8"), "max_new_tokens='8'"),
        (_body(temperature=-0.1), "temperature=-0.1"),
        (_body(temperature=float("nan")), "temperature=nan"),
        (_body(top_p=0.0), "top_p=0.0"),
        (_body(top_p=1.5), "top_p=1.5"),
        (_body(top_k=0), "top_k=0"),
        ({**_body(max_new_tokens=4), "return_sampling_mask": True}, "return_sampling_mask wants top_k or top_p"),
        ({**_body(max_new_tokens=4), "return_routed_experts": True}, "no model with experts"),
        (_body(stop=["\n"]), r"stop=\['\\n'\] is not supported"),
        (_body(min_p=0.1), "min_p=0.1 is not supported"),
        (_body(repetition_penalty=1.1), "repetition_penalty=1.1"),
        (_body(n=2), "n=2"),
        (_body(stop_token_ids=["a"]), "stop_token_ids"),
        ({"input_ids": [5], "rid": 7}, "rid=7"),
        ({"input_ids": [5], "sampling_params": [{}]}, "sampling_params must be an object"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        parse_request(body, _LIMITS)
    assert refusal.value.status == 400


def test_neutral_values_of_unsupported_parameters_pass() -> None:
    assert parse_request(
        _body(max_new_tokens=4, min_p=0.0, repetition_penalty=1.0, n=1, stop=[], frequency_penalty=0), _LIMITS
    )
