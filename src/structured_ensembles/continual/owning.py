"""OwningLearner: a learner whose tasks own neurons of one backbone; the structured and the pruning learner are such.

The logits of a task are bit-identical for ever: its network is cut out of the backbone by its mask, and none of the
entries that it reads is ever written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.common.tables import text_table
from structured_ensembles.continual.fitting import derived
from structured_ensembles.continual.heads import new_head, num_features
from structured_ensembles.continual.learner import Common, Learner
from structured_ensembles.continual.masks import Owners, owner_digits
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.shared import Chosen, Part, SharedBackbone

MOST_STAGES = 100_000  # that a file may tell of
NONE_FREE = "none is free any more"


@dataclass(frozen=True)
class Capacity:
    """Who owns how many neurons: for every group its size, and what each task in the order of learning took of it.

    tasks: their numbers; None for one that was forgotten, but whose neurons others still use.
    """

    tasks: tuple[int | None, ...]
    sizes: Mapping[str, int]
    taken: Mapping[str, tuple[int, ...]]

    @property
    def free(self) -> dict[str, int]:
        return {name: size - sum(self.taken[name]) for name, size in self.sizes.items()}

    def __str__(self) -> str:
        header = ("group", "neurons", *("forgotten" if task is None else f"task {task}" for task in self.tasks), "free")
        rows = [
            (name, str(size), *map(str, self.taken[name]), str(self.free[name])) for name, size in self.sizes.items()
        ]
        return text_table(header, rows)


@dataclass(frozen=True)
class Forgotten:
    """What `forget` did: neurons that are free again, neurons that later tasks still use, tasks proved unchanged."""

    freed: int
    in_use: int
    unchanged: tuple[int, ...]


class OwningLearner(Learner):
    """Tasks own neurons. seal: cut the connections from other neurons into those of a finished task."""

    def __init__(self, backbone: nn.Module, *, seal: bool = True, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        self.shared = SharedBackbone(self.backbone, seal)
        self.stages: dict[int, int] = {}  # of every task: its place in the order of learning
        self.settings |= {"seal": seal}

    @property
    def next_stage(self) -> int:
        return 1 + max(self.stages.values(), default=-1)

    def _copy(self) -> Self:
        copied = super()._copy()
        copied.shared, copied.stages = self.shared.copy(), dict(self.stages)
        copied.backbone = copied.shared.backbone
        return copied

    def _network(self, number: int) -> nn.Module:
        return self.shared.network(self.stages[number], self.heads[number])

    def _take(self, number: int, part: Part, chosen: Chosen) -> None:
        """The task is done: the neurons it has chosen are its own from now on."""
        stage = self.next_stage
        self.shared.commit(part, stage, chosen)
        self.stages[number] = stage

    def capacity(self) -> Capacity:
        """Who owns how many neurons."""
        owners, numbers = self.shared.owners, {stage: number for number, stage in self.stages.items()}
        counts = [owners.count(stage) for stage in range(self.next_stage)]
        return Capacity(
            tuple(numbers.get(stage) for stage in range(self.next_stage)),
            {name: len(own) for name, own in owners.groups.items()},
            {name: tuple(own[name] for own in counts) for name in owners.groups},
        )

    def forget(self, task: int) -> Forgotten:
        """Drop a task and free its neurons; raises an error if that would change any other task, which it cannot.

        Neurons that a task learned later still reads stay as they are, and become free when the last such task is
        forgotten. The weights of freed neurons are drawn anew. If an interrupt comes, the learner is as it was before.
        """
        self._check_known(task)
        changed = self._copy()
        stage = changed.stages.pop(task)
        del changed.heads[task], changed.learned[task]
        owned = self.shared.owners
        changed.shared.owners = owned.release(changed.next_stage - 1)
        freed = sum(int((own >= changed.next_stage).sum()) for own in owned.groups.values())
        if freed:
            changed.shared.redraw(derived(self.seed, task, 3))
        for number in changed.learned:
            before, after = _tensors(self.network(number)), _tensors(changed.network(number))
            if any(not torch.equal(own, other) for own, other in zip(before, after, strict=True)):
                raise AssertionError(f"forgetting task {task} would change task {number}: please report this")
        in_use = sum(changed.shared.owners.count(stage).values()) if stage < changed.next_stage else 0
        self._become(changed)
        return Forgotten(freed, in_use, tuple(changed.learned))

    def memory(self) -> Memory:
        masks = self.shared.owners.neurons * len(self.learned)
        stored = self.shared.owners.neurons * min(self.next_stage, owner_digits(self.next_stage))
        return replace(super().memory(), masks=masks, stored_masks=stored)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        owners = self.shared.owners
        layout, packed = owners.pack(self.next_stage)
        details = {
            "stages": {str(number): stage for number, stage in self.stages.items()},
            "groups": {name: len(own) for name, own in owners.groups.items()},
            "layout": layout,
            "rest": owners.rest,
        }
        return {layout: packed}, details

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        if not self.learned:
            return
        example = self._example(next(iter(self.learned.values())).shape)
        probe = new_head("linear", num_features(self.backbone, example), 1, seed=0).to(example)
        graph = self.shared.graph(probe, 0, example)  # under a head that no task has
        if graph.prunable != details["groups"]:
            raise ValueError("backbone has other neurons than the file")
        self.stages = {int(number): stage for number, stage in details["stages"].items()}
        stages = list(self.stages.values())
        if self.stages.keys() != self.learned.keys() or any(type(own) is not int for own in stages):
            raise ValueError("its stages are not those of its tasks")
        if len(set(stages)) != len(stages) or not 0 <= min(stages) <= max(stages) < MOST_STAGES:
            raise ValueError(f"its stages must differ and be from 0 to below {MOST_STAGES}")
        layout = details["layout"]
        self.shared.owners = Owners.unpack(layout, tensors[layout], details["groups"], details["rest"], self.next_stage)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
