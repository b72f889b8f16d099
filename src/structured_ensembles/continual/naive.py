"""NaiveLearner: one backbone, trained on every task in turn; the lower bound, which forgets."""

from __future__ import annotations

from torch import nn

from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Learner
from structured_ensembles.data import Data
from structured_ensembles.networks.copying import clone_model


class NaiveLearner(Learner):
    """Learner whose tasks share all weights of the backbone."""

    method = "naive"

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        network = TaskNetwork(clone_model(self.backbone), head)
        losses = self._fit(network, data, number)
        self.backbone = network.backbone
        return head, losses

    def _network(self, number: int) -> nn.Module:
        return TaskNetwork(self.backbone, self.heads[number])
