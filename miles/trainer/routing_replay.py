"""Rollout routing replay (R3, arXiv 2510.11370): the trainer sends each token to the experts that the engine chose.

Which experts is the engine's record; how much each counts is the trainer's router, normalised as the model does, and
that is where the gradient goes. A token without a record goes where the trainer's router would send it.

    pack: recorded_experts -> PackedRuns.routing      a layer's forward, first or recomputed -> its own rows
                                                      -> Megatron's hook for replay in the router
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from executors.sampling_record import Routing
from miles.trainer.parallel import Place


def recorded_experts(routings: Sequence[Routing | None], starts: Sequence[int], tokens: int) -> Tensor | None:
    """int16 [tokens, layers * top_k]: each sequence's record from its start on, -1 elsewhere. None without any record.

    Raises ValueError for records of different widths.
    """
    widths = {routing.width for routing in routings if routing is not None}
    if not widths:
        return None
    if len(widths) > 1:
        raise ValueError(f"routing of different widths in one batch: {sorted(widths)} experts a token")
    (width,) = widths
    result = torch.full((tokens, width), -1, dtype=torch.int16)
    for routing, start in zip(routings, starts, strict=True):
        if routing is not None:
            rows = torch.frombuffer(bytearray(routing.experts), dtype=torch.int16).view(-1, width)
            result[start : start + len(rows)] = rows
    return result


def attach(model: torch.nn.Module, place: Place) -> None:
    """Let every router of a GPTModel replay what `packed_seq_params.routing` holds; without one nothing changes."""
    for layer in model.decoder.layers:  # type: ignore[union-attr]
        for router in (module for module in layer.modules() if isinstance(module, TopKRouter)):
            replay = LayerReplay(layer.layer_number - 1, router.config.num_layers, place)
            router.router_replay = replay
            # By the layer's own call, so that a recomputed layer sees its own micro-batch, whichever is newest.
            layer.register_forward_pre_hook(replay.take, with_kwargs=True)


class LayerReplay:
    """One layer's replay, asked by Megatron's router in place of its top-k (`moe_utils.topk_routing_*`, 0.16)."""

    def __init__(self, layer: int, layers: int, place: Place) -> None:
        self._layer = layer
        self._layers = layers
        self._place = place
        self._recorded: Tensor | None = None

    def take(self, _layer: torch.nn.Module, _args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward of the layer begins: keep the rows of the tokens that its router will see.

        Under sequence parallelism the router sees the tensor-parallel rank's share of the tokens.
        """
        routing: Tensor | None = getattr(kwargs.get("packed_seq_params"), "routing", None)
        if routing is None:
            self._recorded = None
            return
        sizes = self._place.sizes
        tokens, width = routing.shape
        if width % self._layers:
            raise ValueError(f"routing of {width} experts a token does not fit a model of {self._layers} layers")
        if sizes.sequence:
            share = tokens // sizes.tensor
            routing = routing[share * self._place.tensor : share * (self._place.tensor + 1)]
        self._recorded = routing.view(len(routing), self._layers, -1)[:, self._layer].long()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of each token's experts, both [tokens, topk]; `scores` is [tokens, experts].

        A row that does not name `topk` different experts is no record.
        """
        own_scores, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._recorded
        if recorded is None:
            return own_scores, own
        if recorded.shape != own.shape:
            raise ValueError(f"routing of {list(recorded.shape)} for a router of {list(own.shape)}")
        ordered = recorded.sort(-1).values
        known = (ordered[:, 0] >= 0) & (ordered[:, -1] < scores.shape[1]) & (ordered.diff(dim=-1) > 0).all(-1)
        indices = torch.where(known.unsqueeze(1), recorded, own)
        return scores.gather(1, indices), indices
