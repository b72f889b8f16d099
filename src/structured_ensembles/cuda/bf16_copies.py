"""The weights of linear layers and convolutions in bfloat16, refreshed after each step.

The numbers are those of autocast, which launches a kernel for each weight in each pass. For networks without a program.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from structured_ensembles.cuda.pair_copies import copy_all


class Bfloat16Copies:
    """Copies of some parameters of a network, by name; gradients are taken of these."""

    def __init__(self, network: nn.Module, names: Collection[str]) -> None:
        self.originals = [network.get_parameter(name) for name in names]
        self.copies = {
            name: original.detach().bfloat16().requires_grad_()
            for name, original in zip(names, self.originals, strict=True)
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters again, after they have changed."""
        copy_all([copy.detach() for copy in self.copies.values()], [original.detach() for original in self.originals])

    def tensors(self) -> list[Tensor]:
        """List all copies, which a step changes."""
        return list(self.copies.values())


def castable_parameters(network: nn.Module) -> list[str]:
    """List the parameters that autocast would cast: of linear layers and convolutions, used by nothing else."""
    users: dict[int, list[type[nn.Module]]] = {}
    for module in network.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(type(module))
    layers = ([nn.Linear], [nn.Conv1d], [nn.Conv2d], [nn.Conv3d])
    return [
        name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
        and users[id(parameter)] in layers
        and name.rpartition(".")[2] in ("weight", "bias")
        and parameter.dtype == torch.float32
        and not parameter._backward_hooks  # a hook on the parameter would not see the copy's gradient
        and not parameter._post_accumulate_grad_hooks
    ]
