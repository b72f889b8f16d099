"""SingleModelLearner: a separate network for every task; the upper bound, which needs the most memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, Unpack

from torch import Tensor, nn

from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Common, Learner
from structured_ensembles.continual.memory import Memory, count_floats
from structured_ensembles.data import Data
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.state import all_tensors, fill


class SingleModelLearner(Learner):
    """Learner whose tasks share nothing; each starts from the backbone's initial weights."""

    method = "single"

    def __init__(self, backbone: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        self.backbones: dict[int, nn.Module] = {}

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        network = TaskNetwork(clone_model(self.backbone), head)
        losses = self._fit(network, data, number)
        self.backbones[number] = network.backbone
        return head, losses

    def _copy(self) -> Self:
        copied = super()._copy()
        copied.backbones = dict(self.backbones)
        return copied

    def _network(self, number: int) -> nn.Module:
        return TaskNetwork(self.backbones[number], self.heads[number])

    def memory(self) -> Memory:
        """Count the first task's network as the backbone, and the others as factors."""
        return replace(super().memory(), factors=sum(map(count_floats, list(self.backbones.values())[1:])))

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {
            f"{number}.{name}": tensor
            for number, backbone in self.backbones.items()
            for name, tensor in all_tensors(backbone).items()
        }, {}

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        for number in self.learned:
            backbone, prefix = clone_model(self.backbone), f"{number}."
            weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            fill(backbone, weights)
            self.backbones[number] = backbone
