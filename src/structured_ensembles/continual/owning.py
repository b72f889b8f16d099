"""OwningLearner: the base of learners whose tasks own neurons of one backbone (structured, pruning).

The logits of a task stay bit-identical: its network is extracted from the backbone by its mask, and the entries that it
reads are never written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_flags
from structured_ensembles.common.tables import text_table
from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.heads import count_features, create_head
from structured_ensembles.continual.learner import Common, Learner
from structured_ensembles.continual.masks import Owners, count_owner_digits
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.shared import Neurons, SharedBackbone, TaskSubnetwork
from structured_ensembles.networks.state import all_tensors

MAX_STAGES = 100_000  # that a file may have
NONE_FREE = "none is free any more"


@dataclass(frozen=True)
class Capacity:
    """Number of neurons per owner: for every group its size, and how many each task took, in the order of learning.

    tasks: their numbers; None for one that was forgotten, but whose neurons others still use.
    """

    tasks: tuple[int | None, ...]
    sizes: Mapping[str, int]
    taken: Mapping[str, tuple[int, ...]]

    @property
    def free(self) -> dict[str, int]:
        """Return the number of free neurons by group."""
        return {name: size - sum(self.taken[name]) for name, size in self.sizes.items()}

    def __str__(self) -> str:
        header = ("group", "neurons", *("forgotten" if task is None else f"task {task}" for task in self.tasks), "free")
        rows = [
            (name, str(size), *map(str, self.taken[name]), str(self.free[name])) for name, size in self.sizes.items()
        ]
        return text_table(header, rows)


@dataclass(frozen=True)
class Forgotten:
    """Effect of `forget`: freed neurons, neurons that later tasks still use, tasks checked to be unchanged."""

    freed: int
    in_use: int
    unchanged: tuple[int, ...]


class OwningLearner(Learner):
    """Learner whose tasks own neurons. seal: cut the connections from other neurons into those of a finished task."""

    def __init__(self, backbone: nn.Module, *, seal: bool = True, **common: Unpack[Common]) -> None:
        check_flags(seal=seal)
        super().__init__(backbone, **common)
        self.shared = SharedBackbone(self.backbone, seal)
        self.stages: dict[int, int] = {}  # of every task: its index in the order of learning
        self.settings |= {"seal": seal}

    @property
    def next_stage(self) -> int:
        """Return the stage of the next task."""
        return 1 + max(self.stages.values(), default=-1)

    def _copy(self) -> Self:
        copied = super()._copy()
        copied.shared, copied.stages = self.shared.copy(), dict(self.stages)
        copied.backbone = copied.shared.backbone
        return copied

    def _network(self, number: int) -> nn.Module:
        return self.shared.network(self.stages[number], self.heads[number])

    def _commit(self, number: int, subnetwork: TaskSubnetwork, chosen: Neurons) -> None:
        """Store the trained neurons of a finished task and make the task their owner."""
        stage = self.next_stage
        self.shared.commit(subnetwork, stage, chosen)
        self.stages[number] = stage

    def capacity(self) -> Capacity:
        """Count the neurons that each task owns."""
        owners, numbers = self.shared.owners, {stage: number for number, stage in self.stages.items()}
        counts = [owners.count(stage) for stage in range(self.next_stage)]
        return Capacity(
            tuple(numbers.get(stage) for stage in range(self.next_stage)),
            {name: len(stages) for name, stages in owners.groups.items()},
            {name: tuple(count[name] for count in counts) for name in owners.groups},
        )

    def forget(self, task: int) -> Forgotten:
        """Drop a task and free its neurons, after checking that no other task changes.

        Neurons that a later task still uses stay as they are, and become free when the last such task is forgotten.
        The weights of freed neurons are reinitialised. On an interrupt the learner stays as it was.
        """
        self._check_known(task)
        changed = self._copy()
        stage = changed.stages.pop(task)
        del changed.heads[task], changed.learned[task]
        owned = self.shared.owners
        changed.shared.owners = owned.release(changed.next_stage - 1)
        freed = sum(int((stages >= changed.next_stage).sum()) for stages in owned.groups.values())
        if freed:
            changed.shared.redraw(fold_seed(self.seed, task, 3))
        for number in changed.learned:
            before, after = (all_tensors(one.network(number)) for one in (self, changed))
            if any(not torch.equal(tensor, after[name]) for name, tensor in before.items()):
                raise AssertionError(f"forgetting task {task} would change task {number}: please report this")
        in_use = sum(changed.shared.owners.count(stage).values()) if stage < changed.next_stage else 0
        self._become(changed)
        return Forgotten(freed, in_use, tuple(changed.learned))

    def memory(self) -> Memory:
        """Count what it stores, with the bits of the masks."""
        masks = self.shared.owners.neurons * len(self.learned)
        stored = self.shared.owners.neurons * min(self.next_stage, count_owner_digits(self.next_stage))
        return replace(super().memory(), masks=masks, stored_masks=stored)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        owners = self.shared.owners
        layout, packed = owners.pack(self.next_stage)
        details = {
            "stages": {str(number): stage for number, stage in self.stages.items()},
            "groups": {name: len(stages) for name, stages in owners.groups.items()},
            "layout": layout,
            "rest": owners.rest,
        }
        return {layout: packed}, details

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        if not self.learned:
            return
        example = self._example(next(iter(self.learned.values())).shape)
        probe = create_head("linear", count_features(self.backbone, example), 1, seed=0).to(example)
        graph = self.shared.trace(probe, example)  # any head will do
        if graph.prunable != details["groups"]:
            raise ValueError("its neurons are not those of the backbone")
        self.stages = {int(number): stage for number, stage in details["stages"].items()}
        stages = list(self.stages.values())
        if self.stages.keys() != self.learned.keys() or any(type(stage) is not int for stage in stages):
            raise ValueError("its stages are not those of its tasks")
        if len(set(stages)) != len(stages) or not 0 <= min(stages) <= max(stages) < MAX_STAGES:
            raise ValueError(f"its stages must differ and be from 0 to below {MAX_STAGES}")
        layout = details["layout"]
        self.shared.owners = Owners.unpack(layout, tensors[layout], details["groups"], details["rest"], self.next_stage)
