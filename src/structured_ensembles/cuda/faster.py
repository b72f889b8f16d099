"""Layers of a network that run on kernels of our own while a graph is captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structured_ensembles.cuda import batch_norm, convolution
from structured_ensembles.cuda.pending import Pending, Waiting

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def replaceable(network: nn.Module) -> list[nn.Module]:
    """Those that we have kernels for, on a GPU, unless somebody gave them a forward of their own."""
    if not any(parameter.is_cuda for parameter in network.parameters()):
        return []
    found: list[nn.Module] = [*batch_norm.replaceable(network), *convolution.replaceable(network)]
    return [module for module in found if "forward" not in vars(module)]


def hooked(network: nn.Module) -> bool:
    """Whether somebody watches what layers get and give: these, or all of the world."""
    everywhere = any(getattr(torch.nn.modules.module, f"_global{hooks}") for hooks in HOOKS)
    return everywhere or any(getattr(layer, hooks) for layer in network.modules() for hooks in HOOKS)


@contextmanager
def faster(modules: Sequence[nn.Module], padded: bool = False, waiting: Waiting | None = None) -> Iterator[None]:
    """While this lasts, these modules use our kernels where they can: in training, on a GPU, channels last.

    padded: whether normalisations may get more channels than they have, which are zero then, and stay so.
    waiting: if what comes after a normalisation may become a part of it, see pending.py.
    """
    counters: list[Tensor] = []

    def forward(module: nn.Module, input: Tensor) -> Tensor:  # so named by torch
        x = input.value() if isinstance(input, Pending) else input
        if module.training and isinstance(module, nn.Conv2d) and convolution.fits(x, module):
            return convolution.convolution(x, module)
        above = x.shape[1] - module.num_features if isinstance(module, nn.BatchNorm2d) else 0
        allowed = above == 0 or (padded and above > 0)
        if module.training and isinstance(module, nn.BatchNorm2d) and allowed and batch_norm.fits(x):
            assert module.num_batches_tracked is not None
            counters.append(module.num_batches_tracked)
            if waiting is not None:
                return waiting.add(x, module)
            return batch_norm.batch_norm(x, module)
        if above and allowed:
            return F.pad(type(module).forward(module, x[:, :-above]), (0, 0, 0, 0, 0, above))
        return type(module).forward(module, x)  # type: ignore[no-any-return, operator]

    for module in modules:
        module.forward = partial(forward, module)  # type: ignore[method-assign, assignment]
    try:
        yield
        if waiting is not None:
            waiting.finish()
        if counters:
            torch._foreach_add_(counters, 1)
    finally:
        for module in modules:
            del module.__dict__["forward"]
