"""`TokenSequence`: one prompt and response as the trainer sees it, from the batch to the micro-batch. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executors.sampling_record import KeptTokens, Routing


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and the tokens to be predicted after it; both have at least one token.

    What is given per response token has as many entries as `response_ids`. Raises ValueError where it has not.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    behaviour: Sequence[float] | None = None
    """The logprob under which each response token was sampled; None where nobody sampled them."""
    advantages: Sequence[float] | None = None
    """Of each response token; None means 0."""
    mask: Sequence[bool] | None = None
    """Which response tokens are trained; None means all. The others (tool results, say) are context only."""
    staleness: Sequence[int] | None = None
    """Optimizer steps between the weights that sampled each token and those now in the trainer; None means 0."""
    weight: float = 1.0
    """What each trained token's loss is multiplied by. Over a batch these make the mean that was asked for (by token,
    by sequence), so how the batch is cut never changes the gradient."""
    kept: KeptTokens | None = None
    """The tokens each response token was drawn from: its logprob is taken within them. None: all of them."""
    routing: Routing | None = None
    """The experts each input token is routed to; None leaves it to the router."""
    reference: Sequence[float] | None = None
    """The reference model's logprob of each response token, where it was computed: for all of a batch, or for none."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise ValueError("a sequence to train on needs a prompt and a response of at least one token each")
        for name in ("behaviour", "advantages", "mask", "staleness", "reference", "kept"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.response_ids):
                raise ValueError(f"{len(self.response_ids)} response tokens but {len(values)} entries in {name}")
        if self.routing is not None and len(self.routing) != self.length:
            raise ValueError(f"{self.length} input tokens but routing of {len(self.routing)}")

    @property
    def length(self) -> int:
        """Input tokens: the last response token is only predicted."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def trained(self) -> int:
        """Trained tokens."""
        return len(self.response_ids) if self.mask is None else sum(self.mask)
