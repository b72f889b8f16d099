"""Owners: which task every neuron of the backbone belongs to; all masks follow from it, and it packs into few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.networks.resizing import Axis

FREE = -1
Layout = Literal["masks", "owners"]


@dataclass(frozen=True)
class Owners:
    """Who owns the neurons: for every group a vector of stages, shape (size,); -1 where a neuron is free.

    A stage is a task's place in the order of learning. The mask of a task is made of the neurons of its own stage (the
    paper's AN_t) and of all earlier ones (PAN_t, their union).
    rest: who owns what belongs to no neuron, such as a layer that cannot be masked: the first task.
    """

    groups: Mapping[str, Tensor]
    rest: int = FREE

    @classmethod
    def none(cls, sizes: Mapping[str, int]) -> Owners:
        """Every neuron is free."""
        return cls({name: torch.full((size,), FREE) for name, size in sizes.items()})

    @property
    def neurons(self) -> int:
        return sum(map(len, self.groups.values()))

    def free(self) -> dict[str, tuple[int, ...]]:
        """The neurons that nobody owns, by group; without the groups that have none."""
        found = {name: tuple(torch.nonzero(own == FREE).flatten().tolist()) for name, own in self.groups.items()}
        return {name: channels for name, channels in found.items() if channels}

    def used(self, stage: int) -> dict[str, tuple[int, ...]]:
        """The mask of the task at `stage`: the neurons of this stage and of the earlier ones, by group."""
        return {
            name: tuple(torch.nonzero((own != FREE) & (own <= stage)).flatten().tolist())
            for name, own in self.groups.items()
        }

    def count(self, stage: int) -> dict[str, int]:
        """How many neurons of each group the task at `stage` owns itself."""
        return {name: int((own == stage).sum()) for name, own in self.groups.items()}

    def give(self, stage: int, chosen: Mapping[str, Sequence[int]]) -> Owners:
        """The task at `stage` takes free neurons."""
        groups = {name: own.clone() for name, own in self.groups.items()}
        for name, channels in chosen.items():
            index = torch.tensor(channels, dtype=torch.int64)
            assert bool((groups[name][index] == FREE).all()), f"neurons of {name} have an owner already"
            groups[name][index] = stage
        return Owners(groups, stage if self.rest == FREE else self.rest)

    def release(self, last: int) -> Owners:
        """Free the neurons of every stage after `last`."""
        groups = {name: torch.where(own > last, FREE, own) for name, own in self.groups.items()}
        return replace(self, groups=groups, rest=FREE if self.rest > last else self.rest)

    def along(self, axis: Axis) -> Tensor:
        """The owners of the positions of a tensor's axis, shape (positions,)."""
        pieces = [
            torch.full((span.size * span.block,), self.rest)
            if span.group is None
            else self.groups[span.group].repeat_interleave(span.block)
            for span in axis
        ]
        return torch.cat(pieces)

    # Storage --------------------------------------------------------------------------------------------------------

    def pack(self, stages: int) -> tuple[Layout, Tensor]:
        """As bits, in rows of ⌈neurons / 8⌉ bytes: one mask per stage, or the owners' binary digits if that is less."""
        owners = torch.cat(list(self.groups.values())).numpy() if self.groups else np.zeros(0, np.int64)
        digits = owner_digits(stages)
        if digits < stages:
            planes = [(owners + 1) >> digit & 1 for digit in range(digits)]
        else:
            planes = [owners == stage for stage in range(stages)]
        packed = np.packbits(np.array(planes, dtype=bool).reshape(len(planes), len(owners)), axis=1)
        return "owners" if digits < stages else "masks", torch.from_numpy(packed)

    @classmethod
    def unpack(cls, layout: Layout, packed: Tensor, sizes: Mapping[str, int], rest: int, stages: int) -> Owners:
        """The inverse of `pack`; raises a ValueError for what `pack` cannot have given."""
        rows = {"masks": stages, "owners": owner_digits(stages)}.get(layout)
        expected = (rows, -(-sum(sizes.values()) // 8))
        if packed.dtype != torch.uint8 or tuple(packed.shape) != expected:
            raise ValueError(f"{layout} are {packed.dtype} of shape {tuple(packed.shape)}, not uint8 of {expected}")
        planes = np.unpackbits(packed.numpy(), axis=1, count=sum(sizes.values())).astype(np.int64)
        weights = 2 ** np.arange(len(planes)) if layout == "owners" else np.arange(1, len(planes) + 1)
        owners = torch.from_numpy(weights @ planes - 1)
        highest = max(owners.tolist(), default=FREE)
        if type(rest) is not int or not FREE <= rest < stages or highest >= stages:
            raise ValueError("neurons belong to tasks that the learner does not know")
        return cls(dict(zip(sizes, owners.split(list(sizes.values())), strict=True)), rest)


def owner_digits(stages: int) -> int:
    """Binary digits that tell apart `stages` owners and nobody: ⌈log2(stages + 1)⌉."""
    return math.ceil(math.log2(stages + 1))
