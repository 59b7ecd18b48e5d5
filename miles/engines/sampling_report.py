"""What SGLang tells about its sampling in `meta_info`, besides tokens and logprobs. Read from the source of 0.5.16 and
0.5.23 (managers/io_struct, tokenizer_manager, scheduler; layers/sampler; state_capturer/routed_experts).

- `output_token_logprobs` are log_softmax(logits / temperature) over the whole vocabulary, before top-k and top-p.
- `return_sampling_mask` adds, per token, `output_token_sampling_mask` (ids kept by top-k, top-p and min-p) and
  `output_token_sampling_logprobs` (normalised over them). Requests without a finite top_k are refused.
- `return_routed_experts` (server: --enable-return-routed-experts) adds, to the finished answer, `routed_experts`:
  base64 of int32 [prompt + completion - 1 - start, layers, top_k], start being `routed_experts_start_len`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from executors.sampling_record import RoutingReport


def reported_kept(meta: Mapping[str, Any], new: int) -> tuple[Sequence[Sequence[int]] | None, tuple[float, ...]]:
    """The kept ids of the `new` last tokens and their logprobs over them; None where they were not told.

    As with logprobs, the server sends either those of all tokens so far or of the new ones: the last `new` in both.
    Raises ValueError for fewer than that.
    """
    masks, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or logprobs is None:
        return None, ()
    masks, logprobs = (masks[-new:], logprobs[-new:]) if new else ((), ())
    if not len(masks) == len(logprobs) == new:
        raise ValueError(f"{new} new tokens but {len(masks)} sampling masks and {len(logprobs)} logprobs over them")
    return masks, tuple(logprobs)


def reported_routing(meta: Mapping[str, Any], start: int) -> RoutingReport | None:
    """The experts of the answer's input tokens from `start` on; None where they were not told.

    Raises ValueError for something that is no base64 of int32.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        return None
    # Numbers of experts fit into 16 bits: the low half of each little-endian int32, also of -1 (none).
    halves = memoryview(base64.b64decode(encoded, validate=True)).cast("h")
    if len(halves) % 2:
        raise ValueError(f"routed experts of {2 * len(halves)} bytes are not int32")
    rows = max(0, meta["prompt_tokens"] + meta["completion_tokens"] - 1 - start)
    return RoutingReport(start, rows, halves[::2].tobytes())
