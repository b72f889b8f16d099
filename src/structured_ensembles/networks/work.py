"""estimate_work(): about how many multiply-adds a network takes for a sample."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, batch_size, call, move_inputs
from structured_ensembles.networks.copying import copy_for_trial


def estimate_work(network: nn.Module, example: Inputs) -> float:
    """Estimate the multiply-adds of a forward pass per sample: those of the layers whose weights are matrices.

    A convolution or linear layer multiplies each value that it returns with as many weights as one of its outputs has.
    Attention between tokens is left out. Infinity for a network that cannot run on the example.
    """
    total = 0

    def count(module: nn.Module, _: Any, outputs: Any) -> None:
        nonlocal total
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and isinstance(outputs, Tensor) and weight.dim() > 1:
            total += outputs.numel() * weight[0].numel()

    try:
        trial = copy_for_trial(network)
        for module in trial.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                module.register_forward_hook(count)
        with torch.no_grad():
            call(trial, move_inputs(example, device_of(trial)))
    except Exception:  # whatever a user's network raises, the training explains it
        return math.inf
    return total / batch_size(example)
