"""The weights of linear layers and convolutions in bfloat16, refreshed after each step.

What autocast computes, without a kernel for each weight in each pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn


class Halves:
    """Copies of some parameters of a network, by name.

    shapes: of those whose copy is larger, the rest being zero, see eights.py.
    whole: the copies; derivatives are taken of these. parts: as large as the parameters.
    """

    def __init__(self, network: nn.Module, names: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.originals = [network.get_parameter(name) for name in names]
        copies = [own.detach().bfloat16() for own in self.originals]
        self.whole = {
            name: padded(half, shapes.get(name)).requires_grad_() for name, half in zip(names, copies, strict=True)
        }
        sizes = [own.shape for own in self.originals]
        self.parts = {
            name: part(half.detach(), size) for (name, half), size in zip(self.whole.items(), sizes, strict=True)
        }

    def refresh(self) -> None:
        copy_all(list(self.parts.values()), self.originals)


def castable(network: nn.Module) -> list[str]:
    """The weights and biases of linear layers and convolutions that nothing else uses: autocast would cast them."""
    users: dict[int, list[type[nn.Module]]] = {}
    for module in network.modules():
        for own in module._parameters.values():
            if own is not None:
                users.setdefault(id(own), []).append(type(module))
    layers = ([nn.Linear], [nn.Conv1d], [nn.Conv2d], [nn.Conv3d])
    return [
        name
        for name, own in network.named_parameters()
        if own.requires_grad
        and users[id(own)] in layers
        and name.rpartition(".")[2] in ("weight", "bias")
        and own.dtype == torch.float32
        and not own._backward_hooks  # a hook on the parameter would not see the copy's derivative
        and not own._post_accumulate_grad_hooks
    ]


def padded(tensor: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    """With zeros up to a shape (outputs, inputs, height, width), if there is one."""
    if shape is None:
        return tensor
    whole = tensor.new_zeros(shape).contiguous(memory_format=torch.channels_last)
    part(whole, tensor.shape).copy_(tensor)
    return whole


def part(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """What is left of a padded tensor without the zeros."""
    return tensor if tensor.shape == shape else tensor[: shape[0], : shape[1]]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One kernel for all that are stored alike; the others, such as parts of something larger, take one each."""
    pairs = list(zip(targets, sources, strict=True))
    alike = [(target, source) for target, source in pairs if target.stride() == source.stride()]
    if alike:
        torch._foreach_copy_([target for target, _ in alike], [source for _, source in alike])
    for target, source in pairs:
        if target.stride() != source.stride():
            target.copy_(source)
