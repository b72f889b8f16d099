"""Linear layers and convolutions that a model calls, found by running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, call, move_inputs
from structured_ensembles.networks.copying import copy_frozen
from structured_ensembles.tracing.walk import LAYERS


@dataclass(frozen=True)
class Layers:
    """Qualified names of the linear layers and convolutions that a model calls, in the order of the first call.

    hidden: layers whose output reaches the model's output only through other layers.
    last: the others; in most networks the one that computes the logits.
    """

    hidden: tuple[str, ...]
    last: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Return the names of hidden and last layers."""
        return self.hidden + self.last


def find_called_layers(model: nn.Module, example: Inputs) -> Layers:
    """Find the called layers by running a copy of `model` on `example` (batch, …), in evaluation and training mode.

    Layers that are never called are left out, even if their weights are used in another way, as in
    `nn.MultiheadAttention`.
    """
    copied = copy_frozen(model)
    names = {module: name for name, module in copied.named_modules()}
    first, last = dict[str, None](), set[str]()
    leaves: list[tuple[str, Tensor]] = []

    def cut(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Detach the output, so that gradients reach only the last layers."""
        first.setdefault(name)
        leaves.append((name, output.detach().requires_grad_()))
        return leaves[-1][1].clone()  # an in-place operation may follow

    for module in copied.modules():
        if isinstance(module, LAYERS):
            module.register_forward_hook(partial(cut, names[module]))
    device = device_of(model)
    example = move_inputs(example, device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad():
        for training in (False, True):
            leaves.clear()
            outputs = tree_leaves(call(copied.train(training), example))
            reached = [output.sum() for output in outputs if isinstance(output, Tensor) and output.requires_grad]
            if reached:
                gradients = torch.autograd.grad(
                    torch.stack(reached).sum(), [leaf for _, leaf in leaves], allow_unused=True
                )
                last |= {name for (name, _), gradient in zip(leaves, gradients, strict=True) if gradient is not None}
    return Layers(tuple(name for name in first if name not in last), tuple(name for name in first if name in last))


def get_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the linear layer or convolution of this name."""
    layer = dict(model.named_modules()).get(name)
    if not isinstance(layer, LAYERS):
        raise ValueError(f"layers must name linear layers and convolutions of the model, not {name!r}")
    return layer
