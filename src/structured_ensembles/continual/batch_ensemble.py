"""BatchEnsembleLearner (Wen et al. 2020): shared weights from the first task, and rank-one factors for every task.

A task uses W ∘ (s rᵀ) in place of every weight W of a linear layer or convolution. The first task trains W, s and r;
the others train their s and r, on the W of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.reweighting import (
    ReweightingLearner,
    TaskTensors,
    copy_tensors_except,
    list_weights,
)
from structured_ensembles.networks.copying import copy_with
from structured_ensembles.networks.state import unsaved_buffers
from structured_ensembles.training import ParameterRule

OUTPUTS, INPUTS = "#outputs", "#inputs"  # suffixes of the factors of a weight


class BatchEnsembleLearner(ReweightingLearner):
    """Learner with rank-one factors per task, which start as random signs; biases and norms belong to the task."""

    method = "batch-ensemble"

    def __init__(self, backbone: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        # Factors have no weight decay, as in the authors' code; here they are modules of a weight's parametrization.
        rule = ParameterRule("*.parametrizations.weight.0.*", weight_decay=0.0)
        self.recipe = replace(self.recipe, rules=(rule,))

    def _factor(self, name: str, weight: Tensor, number: int) -> nn.Module:
        return RankOne(weight.shape, fold_seed(self.seed, number, 2, list_weights(self.backbone).index(name)))

    def _freeze(self, backbone: nn.Module, weights: list[str]) -> None:
        for name in weights if self.task_tensors else ():
            backbone.get_parameter(name).requires_grad_(False)

    def _keep(self, backbone: nn.Module, factors: Mapping[str, nn.Module], original: TaskTensors) -> TaskTensors:
        if not self.task_tensors:
            self.backbone = copy_with(
                self.backbone,
                lambda name, parameter: original.get(name, parameter).clone(),
                lambda _, buffer: buffer.clone(),
            )
        kept = copy_tensors_except(backbone, list(original), lambda tensor: True)
        for name, factor in factors.items():
            kept |= {name + OUTPUTS: factor.outputs.detach().clone(), name + INPUTS: factor.inputs.detach().clone()}  # type: ignore[operator, union-attr]
        return kept

    def _weight(self, weight: Tensor, name: str, task_tensors: TaskTensors) -> Tensor:
        return reweight(weight, task_tensors[name + OUTPUTS], task_tensors[name + INPUTS])

    def _task_shapes(self) -> dict[str, torch.Size]:
        weights = list_weights(self.backbone)
        shapes = {
            name: tensor.shape for name, tensor in copy_tensors_except(self.backbone, weights, lambda _: True).items()
        }
        for name in unsaved_buffers(self.backbone):
            del shapes[name]
        for name in weights:
            outputs, inputs = self.backbone.get_parameter(name).shape[:2]
            shapes |= {name + OUTPUTS: torch.Size([outputs]), name + INPUTS: torch.Size([inputs])}
        return shapes

    def memory(self) -> Memory:
        """Count what it stores, with the tensors of each task."""
        tensors = [tensor for kept in self.task_tensors.values() for tensor in kept.values()]
        floats = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        return replace(super().memory(), factors=floats)


class RankOne(nn.Module):
    """Rank-one factor of a weight: a number for every output and every input, drawn as random signs."""

    def __init__(self, shape: torch.Size, seed: int) -> None:
        super().__init__()
        signs = 2.0 * torch.randint(0, 2, (shape[0] + shape[1],), generator=torch.Generator().manual_seed(seed)) - 1
        outputs, inputs = signs.split([shape[0], shape[1]])
        self.outputs, self.inputs = nn.Parameter(outputs.clone()), nn.Parameter(inputs.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return reweight(weight, self.outputs, self.inputs)


def reweight(weight: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Multiply a weight (outputs, inputs, …) with the matrix outputs · inputsᵀ."""
    trailing = [1] * (weight.dim() - 2)
    return weight * outputs.view(-1, 1, *trailing) * inputs.view(1, -1, *trailing)
