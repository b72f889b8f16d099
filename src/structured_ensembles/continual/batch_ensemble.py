"""BatchEnsembleLearner (Wen et al. 2020): shared weights from the first task, and rank-one factors for every task.

A task sees W ∘ (s rᵀ) in place of every weight W of a linear layer or convolution. The first task trains W, s and r;
the others train their s and r, on the W of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from structured_ensembles.continual.fitting import derived
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.reweighting import Own, ReweightingLearner, tensors_but, weight_names
from structured_ensembles.networks.copying import copy_with, unsaved_buffers
from structured_ensembles.training import ParameterRule

OUTPUTS, INPUTS = "#outputs", "#inputs"  # suffixes of the factors of a weight


class BatchEnsembleLearner(ReweightingLearner):
    """Factors start as random signs. Biases and normalisation, where there are any, are every task's own."""

    method = "batch-ensemble"

    def __init__(self, backbone: nn.Module, **common: Unpack[Common]) -> None:
        super().__init__(backbone, **common)
        # Factors have no weight decay, as in the authors' code; here they are modules of a weight's parametrization.
        rule = ParameterRule("*.parametrizations.weight.0.*", weight_decay=0.0)
        self.recipe = replace(self.recipe, rules=(rule,))

    def _factor(self, name: str, weight: Tensor, number: int) -> nn.Module:
        return RankOne(weight.shape, derived(self.seed, number, 2, weight_names(self.backbone).index(name)))

    def _freeze(self, backbone: nn.Module, weights: list[str]) -> None:
        for name in weights if self.own else ():
            backbone.get_parameter(name).requires_grad_(False)

    def _keep(self, backbone: nn.Module, factors: Mapping[str, nn.Module], original: Own) -> Own:
        if not self.own:
            self.backbone = copy_with(
                self.backbone, lambda name, own: original.get(name, own).clone(), lambda _, own: own.clone()
            )
        own = tensors_but(backbone, list(original), lambda tensor: True)
        for name, factor in factors.items():
            own |= {name + OUTPUTS: factor.outputs.detach().clone(), name + INPUTS: factor.inputs.detach().clone()}  # type: ignore[operator, union-attr]
        return own

    def _weight(self, weight: Tensor, name: str, own: Own) -> Tensor:
        return reweighted(weight, own[name + OUTPUTS], own[name + INPUTS])

    def _own_shapes(self) -> dict[str, torch.Size]:
        weights = weight_names(self.backbone)
        shapes = {name: tensor.shape for name, tensor in tensors_but(self.backbone, weights, lambda _: True).items()}
        for name in unsaved_buffers(self.backbone):
            del shapes[name]
        for name in weights:
            outputs, inputs = self.backbone.get_parameter(name).shape[:2]
            shapes |= {name + OUTPUTS: torch.Size([outputs]), name + INPUTS: torch.Size([inputs])}
        return shapes

    def memory(self) -> Memory:
        floats = sum(t.numel() for own in self.own.values() for t in own.values() if t.is_floating_point())
        return replace(super().memory(), factors=floats)


class RankOne(nn.Module):
    """A factor for every output and every input of a weight, drawn as random signs."""

    def __init__(self, shape: torch.Size, seed: int) -> None:
        super().__init__()
        signs = 2.0 * torch.randint(0, 2, (shape[0] + shape[1],), generator=torch.Generator().manual_seed(seed)) - 1
        outputs, inputs = signs.split([shape[0], shape[1]])
        self.outputs, self.inputs = nn.Parameter(outputs.clone()), nn.Parameter(inputs.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return reweighted(weight, self.outputs, self.inputs)


def reweighted(weight: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """Weight (outputs, inputs, …) times the matrix outputs · inputsᵀ."""
    rest = [1] * (weight.dim() - 2)
    return weight * outputs.view(-1, 1, *rest) * inputs.view(1, -1, *rest)
