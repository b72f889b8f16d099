"""The layers that a model runs through, found by running it: what methods that change layers need to know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, call, moved
from structured_ensembles.networks.copying import shadow_of
from structured_ensembles.tracing.walk import LAYERS


@dataclass(frozen=True)
class Layers:
    """Qualified names of the linear layers and convolutions that a model calls, in the order of the first call.

    hidden: every way from them to the model's output leads through another of them.
    last: the others; of most networks the one before the logits.
    """

    hidden: tuple[str, ...]
    last: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.hidden + self.last


def called_layers(model: nn.Module, example: Inputs) -> Layers:
    """Run a copy of `model` on `example` (batch, …), in evaluation and in training mode.

    A layer that is never called is not among them, even if its weights are used in another way, such as the ones of
    `nn.MultiheadAttention`.
    """
    shadow = shadow_of(model)
    names = {module: name for name, module in shadow.named_modules()}
    first, last = dict[str, None](), set[str]()
    leaves: list[tuple[str, Tensor]] = []

    def cut(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Start the derivatives anew behind this layer: only the last ones are left to have any."""
        first.setdefault(name)
        leaves.append((name, output.detach().requires_grad_()))
        return leaves[-1][1].clone()  # which what follows may overwrite

    for module in shadow.modules():
        if isinstance(module, LAYERS):
            module.register_forward_hook(partial(cut, names[module]))
    device = device_of(model)
    example = moved(example, device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad():
        for training in (False, True):
            leaves.clear()
            outputs = tree_leaves(call(shadow.train(training), example))
            reached = [output.sum() for output in outputs if isinstance(output, Tensor) and output.requires_grad]
            if reached:
                found = torch.autograd.grad(torch.stack(reached).sum(), [leaf for _, leaf in leaves], allow_unused=True)
                last |= {name for (name, _), derivative in zip(leaves, found, strict=True) if derivative is not None}
    return Layers(tuple(name for name in first if name not in last), tuple(name for name in first if name in last))


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """The linear layer or convolution of this name."""
    found = dict(model.named_modules()).get(name)
    if not isinstance(found, LAYERS):
        raise ValueError(f"layers names {name!r}, which is no linear layer or convolution of the model")
    return found
