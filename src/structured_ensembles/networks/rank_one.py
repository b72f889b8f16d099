"""A description of networks that compute several members at a time, which differ in rank-one factors of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class RankOneMembers:
    """Members whose layers share a weight: that of member m is weight · output_factors[m] ⊗ input_factors[m].

    A network that has such a description as its attribute `rank_one` repeats its inputs for each member, and gives them
    to `network`, whose hooks on `layers` apply the factors. Each of these has `weight`, `input_factors` (members,
    inputs), `output_factors` and perhaps `biases` (members, outputs). Everything else is shared.
    """

    network: nn.Module
    prefix: str  # of the names of its tensors
    layers: tuple[str, ...]
    members: int
