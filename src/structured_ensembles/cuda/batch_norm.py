"""Batch normalisation, and a sum and a ReLU that follow it, in four kernels for images stored channels last.

Two are forward, two backward. PyTorch takes eight, among them fills of counters and an update of the running
statistics, and three more for a sum and a ReLU. A fleet of small networks is bound by the number of kernels and by what
they read and write rather than by their work, and of PyTorch's, normalisation has more than half. As in PyTorch,
statistics are float32 whatever the type of the images, and merged in a numerically safe way (Chan et al. 1979): every
block of rows gives its own mean and sum of squares around it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from structured_ensembles.cuda.launch_grid import divided, in_units, power_of_two

MOST_BLOCKS = 256  # of rows: what the second kernel of a pair reads of the first's results stays small


def batch_norm(
    x: Tensor, module: nn.BatchNorm2d, other: Tensor | None = None, relu: bool = False, again: bool = False
) -> Tensor:
    """What `module` makes of x (batch, channels, height, width) in training, running statistics included.

    If x has more channels than the module, those on top must be zero, and are so in what it makes of them.
    other: is added to it, (batch, channels, height, width) of the same type. relu: comes last.
    again: the running statistics know of x already.
    """
    momentum = 0.0 if again else module.momentum
    return _BatchNorm.apply(x, other, module.weight, module.bias, module, relu, momentum)  # type: ignore[no-any-return]


def fits(x: Tensor) -> bool:
    """Whether `batch_norm` can do it."""
    return (
        x.is_cuda
        and x.dim() == 4
        and x.numel() > x.shape[1]
        and x.numel() < 2**31
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def replaceable(network: nn.Module) -> list[nn.BatchNorm2d]:
    """The ordinary batch normalisations of a network; none where there is no Triton."""
    if find_spec("triton") is None:
        return []
    ordinary = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    return [
        module
        for module in ordinary
        if type(module) is nn.BatchNorm2d
        and module.affine
        and module.track_running_stats
        and module.momentum is not None
        and module.weight.dtype == torch.float32
    ]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        module: nn.BatchNorm2d,
        relu: bool,
        momentum: float,
    ) -> Tensor:
        from structured_ensembles.cuda.kernels import batch_norm as kernels

        shape = _Shape(x)
        partial = torch.empty(2, shape.blocks, shape.width, device=x.device)
        kernels.moments[shape.grid](x, partial, shape.rows, shape.units, shape.per_block, **shape.tile)
        y = torch.empty_like(x)
        saved = torch.empty(2, shape.width, device=x.device)
        if other is not None:
            other = other.contiguous(memory_format=torch.channels_last)
        kernels.normalize[shape.grid](
            x, x if other is None else other, partial, weight, bias, y, saved, module.running_mean, module.running_var,
            shape.rows, shape.units, len(weight), shape.per_block, shape.blocks, module.eps, momentum,
            ADD=other is not None, RELU=relu, BLOCKS=shape.most, **shape.tile,
        )  # fmt: skip
        ctx.add, ctx.relu = other is not None, relu
        ctx.save_for_backward(x, y if ctx.add and relu else x, weight, bias, saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from structured_ensembles.cuda.kernels import batch_norm as kernels

        x, y, weight, bias, saved = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        shape = _Shape(x)
        partial = torch.empty(2, shape.blocks, shape.width, device=x.device)
        dother = torch.empty_like(x) if ctx.add and ctx.relu else dy
        kernels.sums[shape.grid](
            x, y, dy, saved, weight, bias, partial, dother, shape.rows, shape.units, len(weight), shape.per_block,
            ADD=ctx.add, RELU=ctx.relu, **shape.tile,
        )  # fmt: skip
        dx = torch.empty_like(x)
        derivatives = torch.empty(2, len(weight), device=x.device)
        kernels.derive[shape.grid](
            x, dother, saved, partial, weight, bias, dx, derivatives,
            shape.rows, shape.units, len(weight), shape.per_block, shape.blocks,
            RELU=ctx.relu and not ctx.add, BLOCKS=shape.most, **shape.tile,
        )  # fmt: skip
        return dx, dother if ctx.add else None, derivatives[0], derivatives[1], None, None, None


class _Shape:
    """How a tensor (batch, channels, height, width), stored channels last, is cut into blocks of rows and channels."""

    def __init__(self, x: Tensor) -> None:
        self.width = x.shape[1]
        self.rows = x.numel() // self.width
        self.units, unit = in_units(self.width)
        wide = min(power_of_two(self.width), 64)
        high = max(4096 // wide, 16)
        tiles = divided(self.rows, high)
        self.most = MOST_BLOCKS // 2 if wide > 16 and tiles <= MOST_BLOCKS else MOST_BLOCKS
        self.blocks = min(tiles, self.most)
        self.per_block = divided(divided(self.rows, self.blocks), high) * high
        self.blocks = divided(self.rows, self.per_block)
        self.grid = (self.blocks, divided(self.width, wide))
        self.tile = {"UNIT": unit, "HIGH": high, "WIDE": wide}
