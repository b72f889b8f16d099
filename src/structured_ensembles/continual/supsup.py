"""SupSupLearner (Wortsman et al. 2020): a frozen random network, and for every task a mask over its weights.

Weights are signed constants; a task trains a score for each, and uses the weights with the largest |score|. Gradients
pass the selection unchanged (straight-through).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_number
from structured_ensembles.continual.fitting import fold_seed
from structured_ensembles.continual.learner import Common
from structured_ensembles.continual.memory import Memory
from structured_ensembles.continual.reweighting import (
    ReweightingLearner,
    TaskTensors,
    copy_tensors_except,
    list_weights,
)
from structured_ensembles.networks.state import unsaved_buffers


class SupSupLearner(ReweightingLearner):
    """Learner with a mask over the weights of a frozen random network for each task.

    keep: the share of weights that a task uses. The other arguments are those of `Learner`.
    The backbone gives the signs of the weights; their size is Kaiming's for the weights that are kept. Biases and the
    affine parameters of norms are never trained; the norms' statistics belong to the task.
    """

    method = "supsup"

    def __init__(self, backbone: nn.Module, keep: float = 0.5, **common: Unpack[Common]) -> None:
        check_number("keep", keep)
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, not {keep!r}")
        super().__init__(backbone, **common)
        self.keep = keep
        self.settings |= {"keep": keep}
        with torch.no_grad():
            for name in list_weights(self.backbone):
                weight = self.backbone.get_parameter(name)
                fan = keep * weight.numel() / len(weight)
                weight.copy_(torch.where(weight < 0, -1.0, 1.0) * math.sqrt(2 / fan))

    def _factor(self, name: str, weight: Tensor, number: int) -> nn.Module:
        index = list_weights(self.backbone).index(name)
        return Supermask(weight.shape, self.keep, fold_seed(self.seed, number, 2, index))

    def _freeze(self, backbone: nn.Module, weights: list[str]) -> None:
        backbone.requires_grad_(False)

    def _keep(self, backbone: nn.Module, factors: Mapping[str, nn.Module], original: TaskTensors) -> TaskTensors:
        masks = {name: factor.mask() for name, factor in factors.items()}  # type: ignore[operator]
        return masks | copy_tensors_except(
            backbone, list(original), lambda tensor: not isinstance(tensor, nn.Parameter)
        )

    def _weight(self, weight: Tensor, name: str, task_tensors: TaskTensors) -> Tensor:
        return weight * task_tensors[name]

    def _task_shapes(self) -> dict[str, torch.Size]:
        buffers = dict(self.backbone.named_buffers())
        shapes = {name: buffers[name].shape for name in buffers.keys() - unsaved_buffers(self.backbone)}
        return shapes | {name: self.backbone.get_parameter(name).shape for name in list_weights(self.backbone)}

    def memory(self) -> Memory:
        """Count what it stores, with the masks and the statistics of norms."""
        tensors = [tensor for kept in self.task_tensors.values() for tensor in kept.values()]
        masks = sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.bool)
        floats = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        return replace(super().memory(), masks=masks, factors=floats)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, details = super()._state()
        packed = {
            name: torch.from_numpy(np.packbits(tensor.cpu().numpy())) if tensor.dtype == torch.bool else tensor
            for name, tensor in tensors.items()
        }
        return packed, details

    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None:
        shapes = {name: self.backbone.get_parameter(name).shape for name in list_weights(self.backbone)}
        unpacked = dict(tensors)
        for name, tensor in tensors.items():
            shape = shapes.get(name.partition(".")[2])
            if shape is not None:
                if tensor.dtype != torch.uint8 or tensor.shape != (-(-shape.numel() // 8),):
                    raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not a mask's bits")
                bits = np.unpackbits(tensor.numpy(), count=shape.numel()).astype(bool)
                unpacked[name] = torch.from_numpy(bits).view(shape)
        super()._restore(unpacked, details)


class Supermask(nn.Module):
    """Mask of a weight by trained scores: 1 where a score is among the largest, else 0."""

    def __init__(self, shape: torch.Size, keep: float, seed: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(shape[1:].numel())  # as torch initialises the weights of layers
        uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        self.scores = nn.Parameter((2 * uniform - 1) * bound)
        self.dropped = int((1 - keep) * self.scores.numel())

    def mask(self) -> Tensor:
        """Return the mask, booleans in the shape of the weight."""
        return _largest(self.scores.detach().abs(), self.dropped)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * _StraightThrough.apply(self.scores.abs(), self.dropped)


class _StraightThrough(torch.autograd.Function):
    """Mask of the largest scores, whose gradient passes to the scores unchanged."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dropped: int) -> Tensor:
        return _largest(scores, dropped).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _largest(scores: Tensor, dropped: int) -> Tensor:
    """Return booleans in the shape of scores: True for all but the `dropped` smallest."""
    if dropped == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    flat = scores.flatten()
    # On a GPU, kthvalue uses a single block of threads; sorting uses all of it.
    threshold = flat.sort().values[dropped - 1] if flat.is_cuda else flat.kthvalue(dropped).values
    return scores > threshold
