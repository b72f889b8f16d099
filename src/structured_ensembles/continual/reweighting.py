"""ReweightingLearner: the base of learners whose tasks multiply shared weights with small factors.

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
from structured_ensembles.networks.copying import clone_model, copy_with
from structured_ensembles.networks.state import unsaved_buffers

TaskTensors = dict[str, Tensor]  # the tensors that a task does not share, by name


def list_weights(backbone: nn.Module) -> list[str]:
    """List the weights of all linear layers and convolutions by their parameter names."""
    layers = [
        name for name, module in backbone.named_modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]
    known = dict(backbone.named_parameters())
    names = [f"{name}.weight" if name else "weight" for name in layers]
    return [name for name in names if name in known]


class ReweightingLearner(Learner):
    """Learner whose tasks reweight a shared backbone. task_tensors: the tensors of each task, by its number."""

    def __init__(self, backbone: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        self.task_tensors: dict[int, TaskTensors] = {}

    @abstractmethod
    def _factor(self, name: str, weight: Tensor, number: int) -> nn.Module:
        """Create a factor for a weight: a module that maps the shared weight to the task's."""

    @abstractmethod
    def _freeze(self, backbone: nn.Module, weights: list[str]) -> None:
        """Freeze what a task may not change in its copy of the backbone; `weights` are the shared weights."""

    @abstractmethod
    def _keep(self, backbone: nn.Module, factors: Mapping[str, nn.Module], original: TaskTensors) -> TaskTensors:
        """Return the tensors that the trained task keeps. original: its backbone's weights before their factors."""

    @abstractmethod
    def _weight(self, weight: Tensor, name: str, task_tensors: TaskTensors) -> Tensor:
        """Return the task's weight."""

    def _learn(self, number: int, data: Data, head: nn.Module) -> tuple[nn.Module, list[float]]:
        backbone = clone_model(self.backbone)
        weights = list_weights(backbone)
        self._freeze(backbone, weights)
        factors = {}
        for name in weights:
            factors[name] = self._factor(name, backbone.get_parameter(name), number).to(self.device)
            layer = backbone.get_submodule(name.rpartition(".")[0])
            parametrize.register_parametrization(layer, "weight", factors[name])
        losses = self._fit(TaskNetwork(backbone, head), data, number)
        # The names that `parametrize` gives to the shared weights.
        hidden = {name: name.removesuffix("weight") + "parametrizations.weight.original" for name in weights}
        original = {name: backbone.get_parameter(path).detach() for name, path in hidden.items()}
        self.task_tensors[number] = self._keep(backbone, factors, original)
        return head, losses

    def _copy(self) -> Self:
        copied = super()._copy()
        copied.task_tensors = dict(self.task_tensors)
        return copied

    def _network(self, number: int) -> nn.Module:
        kept, weights = self.task_tensors[number], set(list_weights(self.backbone))

        def reweight(name: str, tensor: Tensor) -> Tensor:
            return self._weight(tensor, name, kept) if name in weights else kept.get(name, tensor)

        return TaskNetwork(copy_with(self.backbone, reweight, reweight), self.heads[number])

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            f"{number}.{name}": tensor for number, kept in self.task_tensors.items() for name, tensor in kept.items()
        }
        return tensors, {}

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        for name, tensor in tensors.items():
            number, _, tensor_name = name.partition(".")
            self.task_tensors.setdefault(int(number), {})[tensor_name] = tensor.to(self.device)
        expected, optional = self._task_shapes(), unsaved_buffers(self.backbone)
        for task in {*self.task_tensors, *self.learned}:
            kept = self.task_tensors.setdefault(task, {})
            shapes = {name: tensor.shape for name, tensor in kept.items() if name not in optional}
            differing = {name for name, _ in set(shapes.items()) ^ set(expected.items())}
            if differing or task not in self.learned:
                raise ValueError(f"{min(differing, default='a tensor')} of task {task} does not fit the backbone")

    @abstractmethod
    def _task_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of a task's tensors, without non-persistent buffers, which may grow."""


def copy_tensors_except(backbone: nn.Module, weights: list[str], wanted: Callable[[Tensor], bool]) -> TaskTensors:
    """Copy the wanted tensors of a reweighted backbone, except for the shared weights: biases, norms."""
    tensors = [*backbone.named_parameters(), *backbone.named_buffers()]
    return {
        name: tensor.detach().clone()
        for name, tensor in tensors
        if name not in weights and ".parametrizations." not in f".{name}" and wanted(tensor)
    }
