"""Owners: the task that owns each neuron of the backbone, from which all masks follow; stored in few bits."""

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
    """Owners of the neurons: for every group a vector of stages, shape (size,); -1 where a neuron is free.

    A stage is a task's index in the order of learning. The mask of a task consists of the neurons of its stage (the
    paper's AN_t) and of all earlier ones (PAN_t, their union).
    rest: the owner of entries that belong to no neuron, such as a layer that cannot be masked: the first task.
    """

    groups: Mapping[str, Tensor]
    rest: int = FREE

    @classmethod
    def none(cls, sizes: Mapping[str, int]) -> Owners:
        """Create owners of groups of these sizes, with every neuron free."""
        return cls({name: torch.full((size,), FREE) for name, size in sizes.items()})

    @property
    def neurons(self) -> int:
        """Return the number of neurons in all groups."""
        return sum(map(len, self.groups.values()))

    def free(self) -> dict[str, tuple[int, ...]]:
        """Return the free neurons by group; groups without any are left out."""
        free = {name: tuple(torch.nonzero(owners == FREE).flatten().tolist()) for name, owners in self.groups.items()}
        return {name: channels for name, channels in free.items() if channels}

    def used(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the mask of the task at `stage`: the neurons of this stage and of earlier ones, by group."""
        return {
            name: tuple(torch.nonzero((owners != FREE) & (owners <= stage)).flatten().tolist())
            for name, owners in self.groups.items()
        }

    def count(self, stage: int) -> dict[str, int]:
        """Count the neurons of each group that the task at `stage` owns."""
        return {name: int((owners == stage).sum()) for name, owners in self.groups.items()}

    def give(self, stage: int, chosen: Mapping[str, Sequence[int]]) -> Owners:
        """Return owners in which the task at `stage` owns the chosen, free neurons."""
        groups = {name: owners.clone() for name, owners in self.groups.items()}
        for name, channels in chosen.items():
            index = torch.tensor(channels, dtype=torch.int64)
            assert bool((groups[name][index] == FREE).all()), f"neurons of {name} have an owner already"
            groups[name][index] = stage
        return Owners(groups, stage if self.rest == FREE else self.rest)

    def release(self, last: int) -> Owners:
        """Return owners in which the neurons of every stage after `last` are free."""
        groups = {name: torch.where(owners > last, FREE, owners) for name, owners in self.groups.items()}
        return replace(self, groups=groups, rest=FREE if self.rest > last else self.rest)

    def along(self, axis: Axis) -> Tensor:
        """Return the owners of the positions of a tensor's axis, shape (positions,)."""
        pieces = [
            torch.full((span.size * span.block,), self.rest)
            if span.group is None
            else self.groups[span.group].repeat_interleave(span.block)
            for span in axis
        ]
        return torch.cat(pieces)

    # Storage --------------------------------------------------------------------------------------------------------

    def pack(self, stages: int) -> tuple[Layout, Tensor]:
        """Pack into rows of ⌈neurons / 8⌉ bytes: one mask per stage, or the owners' binary digits if that is less."""
        owners = torch.cat(list(self.groups.values())).numpy() if self.groups else np.zeros(0, np.int64)
        digits = count_owner_digits(stages)
        if digits < stages:
            planes = [(owners + 1) >> digit & 1 for digit in range(digits)]
        else:
            planes = [owners == stage for stage in range(stages)]
        packed = np.packbits(np.array(planes, dtype=bool).reshape(len(planes), len(owners)), axis=1)
        return "owners" if digits < stages else "masks", torch.from_numpy(packed)

    @classmethod
    def unpack(cls, layout: Layout, packed: Tensor, sizes: Mapping[str, int], rest: int, stages: int) -> Owners:
        """Invert `pack`; raise a ValueError for anything that `pack` cannot have returned."""
        rows = {"masks": stages, "owners": count_owner_digits(stages)}.get(layout)
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


def count_owner_digits(stages: int) -> int:
    """Count the binary digits for `stages` owners and free: ⌈log2(stages + 1)⌉."""
    return math.ceil(math.log2(stages + 1))
