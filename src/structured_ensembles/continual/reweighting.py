"""Tasks that share the weights of a backbone, each seeing them through something small of its own.

SupSup multiplies every weight with 0 or 1, BatchEnsemble every weight matrix with a matrix of rank one. While a task
trains, its factor is a parametrization of each layer's weight; afterwards the product is an ordinary network.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from structured_ensembles.continual.heads import TaskNetwork
from structured_ensembles.continual.learner import Common, Learner
from structured_ensembles.data import Data
from structured_ensembles.networks.copying import clone_of, copy_with, unsaved_buffers

Own = dict[str, Tensor]  # what a task has of its own, by name


def weight_names(backbone: nn.Module) -> list[str]:
    """The weights of all linear layers and convolutions, as the backbone's parameters are called."""
    layers = [
        name for name, module in backbone.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]
    known = dict(backbone.named_parameters())
    names = [f"{name}.weight" if name else "weight" for name in layers]
    return [name for name in names if name in known]


class ReweightingLearner(Learner):
    """A learner whose tasks reweight a shared backbone; what a task has of its own is in `own`, by its number."""

    def __init__(self, backbone: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        self.own: dict[int, Own] = {}

    @abstractmethod
    def _factor(self, name: str, weight: Tensor, number: int) -> nn.Module:
        """A new factor for a weight: a module that maps the shared weight to the task's."""

    @abstractmethod
    def _freeze(self, backbone: nn.Module, weights: list[str]) -> None:
        """Say what a task may change in its copy of the backbone, of which `weights` are the shared ones."""

    @abstractmethod
    def _keep(self, backbone: nn.Module, factors: Mapping[str, nn.Module], original: Own) -> Own:
        """What the trained task keeps. original: the weights in its copy of the backbone, before their factors."""

    @abstractmethod
    def _weight(self, weight: Tensor, name: str, own: Own) -> Tensor:
        """The weight that the task sees."""

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        backbone = clone_of(self.backbone)
        weights = weight_names(backbone)
        self._freeze(backbone, weights)
        factors = {}
        for name in weights:
            factors[name] = self._factor(name, backbone.get_parameter(name), number).to(self.device)
            layer = backbone.get_submodule(name.rpartition(".")[0])
            parametrize.register_parametrization(layer, "weight", factors[name])
        losses = self._fit(TaskNetwork(backbone, head), data, number)
        # What `parametrize` calls the weight under the parametrization.
        hidden = {name: name.removesuffix("weight") + "parametrizations.weight.original" for name in weights}
        original = {name: backbone.get_parameter(own).detach() for name, own in hidden.items()}
        self.own[number] = self._keep(backbone, factors, original)
        return head, losses

    def _copy(self) -> Self:
        copied = super()._copy()
        copied.own = dict(self.own)
        return copied

    def _network(self, number: int) -> nn.Module:
        own, weights = self.own[number], set(weight_names(self.backbone))

        def seen(name: str, tensor: Tensor) -> Tensor:
            return self._weight(tensor, name, own) if name in weights else own.get(name, tensor)

        return TaskNetwork(copy_with(self.backbone, seen, seen), self.heads[number])

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {f"{number}.{name}": tensor for number, own in self.own.items() for name, tensor in own.items()}, {}

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        for name, tensor in tensors.items():
            number, _, own = name.partition(".")
            self.own.setdefault(int(number), {})[own] = tensor.to(self.device)
        expected, optional = self._own_shapes(), unsaved_buffers(self.backbone)
        for task in {*self.own, *self.learned}:
            kept = self.own.setdefault(task, {})
            found = {name: tensor.shape for name, tensor in kept.items() if name not in optional}
            differing = {name for name, _ in set(found.items()) ^ set(expected.items())}
            if differing or task not in self.learned:
                raise ValueError(f"{min(differing, default='a tensor')} of task {task} does not fit the backbone")

    @abstractmethod
    def _own_shapes(self) -> dict[str, torch.Size]:
        """The shapes of what a task keeps, without non-persistent buffers, which may grow."""


def tensors_but(backbone: nn.Module, weights: list[str], wanted: Callable[[Tensor], bool]) -> Own:
    """Copies of the tensors of a reweighted backbone that are no shared weights: biases, normalisation."""
    found = [*backbone.named_parameters(), *backbone.named_buffers()]
    return {
        name: tensor.detach().clone()
        for name, tensor in found
        if name not in weights and ".parametrizations." not in f".{name}" and wanted(tensor)
    }
