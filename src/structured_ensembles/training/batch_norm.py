"""Batch normalisation in four kernels: two forward, two backward, for images stored channels last.

PyTorch takes eight, among them fills of counters and an update of the running statistics. A fleet of small networks is
bound by the number of kernels rather than by their work, and normalisation has more than half of them. As in PyTorch,
statistics are float32 whatever the type of the images, and merged in a numerically safe way (Chan et al. 1979): every
block of rows gives its own mean and sum of squares around it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

MOST_BLOCKS = 256  # of rows: what the second kernel of a pair reads of the first's results stays small


def batch_norm(x: Tensor, module: nn.BatchNorm2d) -> Tensor:
    """What `module` makes of x (batch, channels, height, width) in training, running statistics included.

    If x has more channels than the module, those on top must be zero, and are zero in the result.
    """
    return _BatchNorm.apply(x, module.weight, module.bias, module)  # type: ignore[no-any-return]


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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: nn.BatchNorm2d) -> Tensor:
        from structured_ensembles.training.kernels import batch_norm as kernels

        shape = _Shape(x)
        partial = torch.empty(2, shape.blocks, shape.width, device=x.device)
        kernels.moments[shape.grid](x, partial, shape.rows, shape.width, shape.per_block, **shape.tile)
        y = torch.empty_like(x)
        saved = torch.empty(2, shape.width, device=x.device)
        kernels.normalize[shape.grid](
            x, partial, weight, bias, y, saved, module.running_mean, module.running_var,
            shape.rows, shape.width, len(weight), shape.per_block, shape.blocks, module.eps, module.momentum,
            BLOCKS=_power_of_two(shape.blocks), **shape.tile,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, saved = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        from structured_ensembles.training.kernels import batch_norm as kernels

        shape = _Shape(x)
        partial = torch.empty(2, shape.blocks, shape.width, device=x.device)
        kernels.sums[shape.grid](x, dy, saved, partial, shape.rows, shape.width, shape.per_block, **shape.tile)
        dx = torch.empty_like(x)
        derivatives = torch.empty(2, len(weight), device=x.device)
        kernels.derive[shape.grid](
            x, dy, saved, partial, weight, dx, derivatives,
            shape.rows, shape.width, len(weight), shape.per_block, shape.blocks,
            BLOCKS=_power_of_two(shape.blocks), **shape.tile,
        )  # fmt: skip
        return dx, derivatives[0], derivatives[1], None


class _Shape:
    """How a tensor (batch, channels, height, width), stored channels last, is cut into blocks of rows and channels."""

    def __init__(self, x: Tensor) -> None:
        self.width = x.shape[1]
        self.rows = x.numel() // self.width
        wide = min(_power_of_two(self.width), 64)
        high = max(4096 // wide, 16)
        self.blocks = min(_divide(self.rows, high), MOST_BLOCKS)
        self.per_block = _divide(_divide(self.rows, self.blocks), high) * high
        self.blocks = _divide(self.rows, self.per_block)
        self.grid = (self.blocks, _divide(self.width, wide))
        self.tile = {"HIGH": high, "WIDE": wide}


def _divide(number: int, by: int) -> int:
    """Rounded up."""
    return -(-number // by)


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
