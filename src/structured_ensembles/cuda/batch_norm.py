"""Batch norm of stacked members, with a sum and a ReLU that follow it, in few kernels for images stored channels last.

Forward: moments (unless a convolution has left them), normalize. Backward: gradient sums (unless a convolution has left
them), input gradient. As in PyTorch, statistics are float32 whatever the type of the images, and merged in a
numerically safe way (Chan et al. 1979): every block of rows gives its mean and its squared deviations from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from structured_ensembles.cuda.convolution import LARGEST, BlockSums
from structured_ensembles.cuda.launch import empty, launch
from structured_ensembles.cuda.launch_grid import ceil_div, channel_units, moment_blocks, power_of_two

TILE, WARPS = 8192, 4  # elements that a program loads at a time
PROGRAMS = 320  # of all members; more are slower, since each merges the sums of all blocks


@dataclass(frozen=True)
class Norm:
    """Parameters and running statistics of a batch norm, each (members, channels), float32."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float


def fits(x: Tensor, members: int) -> bool:
    """Tell whether the kernels below take x: floats on a GPU, channels last, more than one pixel for each member."""
    return (
        x.is_cuda
        and find_spec("triton") is not None
        and x.dim() == 4
        and x.numel() > x.shape[1] * members
        and x.numel() < LARGEST
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def moments(x: Tensor, members: int) -> BlockSums:
    """Return means and squared deviations of blocks of rows of x (members × images, channels, height, width)."""
    from structured_ensembles.cuda.kernels import batch_norm as kernels

    blocks = Blocks(x, members)
    partial = empty(members, 3, blocks.number, blocks.width, like=x)
    launch(kernels.moments, blocks.grid, x, partial, blocks.rows, blocks.units, blocks.per_block, **blocks.tile)
    return BlockSums(partial)


def normalize(x: Tensor, sums: BlockSums, norm: Norm, add: Tensor | None, relu: bool) -> tuple[Tensor, Tensor]:
    """Return relu(norm(x) + add), and mean and 1 / deviation, (members, 2, channels), for the backward pass."""
    from structured_ensembles.cuda.kernels import batch_norm as kernels

    members = len(norm.weight)
    blocks = Blocks(x, members)
    y = empty(*x.shape, like=x, dtype=x.dtype, channels_last=True)
    saved = empty(members, 2, blocks.width, like=x)
    number = sums.partial.shape[2]
    launch(
        kernels.normalize, blocks.grid,
        x, x if add is None else add, sums.partial, norm.weight, norm.bias, y, saved, norm.running_mean,
        norm.running_var, blocks.rows, blocks.units, blocks.per_block, number, norm.eps,
        norm.momentum, ADD=add is not None, RELU=relu, BLOCKS=_merged_blocks(number, blocks.width), **blocks.tile,
    )  # fmt: skip
    return y, saved


def gradient_sums(dy: Tensor, x: Tensor, y: Tensor, saved: Tensor, norm: Norm, mask: int) -> tuple[Tensor, BlockSums]:
    """Return the gradient of the ReLU's input, and of weight and bias in blocks. mask: see `NormBefore`."""
    from structured_ensembles.cuda.kernels import batch_norm as kernels

    members = len(norm.weight)
    blocks = Blocks(x, members)
    masked = empty(*x.shape, like=x, dtype=x.dtype, channels_last=True) if mask else dy
    partial = empty(members, 3, blocks.number, blocks.width, like=x)
    launch(
        kernels.gradient_sums, blocks.grid,
        x, y, dy, saved, norm.weight, norm.bias, partial, masked, blocks.rows, blocks.units, blocks.per_block,
        MASK=mask, **blocks.tile,
    )  # fmt: skip
    return masked, BlockSums(partial)


def input_gradient(masked: Tensor, sums: BlockSums, x: Tensor, saved: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the parameters, (2, members, channels): weight and bias.

    masked, sums: what `gradient_sums` returns, or a convolution's epilogue.
    """
    from structured_ensembles.cuda.kernels import batch_norm as kernels

    members = len(norm.weight)
    blocks = Blocks(x, members)
    dx = empty(*x.shape, like=x, dtype=x.dtype, channels_last=True)
    parameter_gradients = empty(2, members, blocks.width, like=x)
    number = sums.partial.shape[2]
    launch(
        kernels.input_gradient, blocks.grid,
        x, masked, saved, sums.partial, norm.weight, dx, parameter_gradients, blocks.rows, blocks.units,
        blocks.per_block, number, BLOCKS=_merged_blocks(number, blocks.width), **blocks.tile,
    )  # fmt: skip
    return dx, parameter_gradients


def _merged_blocks(number: int, channels: int) -> int:
    """Return how many blocks a kernel merges at a time."""
    return min(power_of_two(number), moment_blocks(channels))


class Blocks:
    """The blocks of rows into which a stacked tensor (members × images, channels, height, width) is cut."""

    def __init__(self, x: Tensor, members: int) -> None:
        self.width = x.shape[1]
        self.rows = x.numel() // (self.width * members)
        self.units, unit = channel_units(self.width)
        wide = min(power_of_two(self.width), 64)
        high = max(TILE // wide, 16)
        tiles_of_channels = ceil_div(self.width, wide)
        max_blocks = max(PROGRAMS // (members * tiles_of_channels), 16)
        self.number = min(ceil_div(self.rows, high), moment_blocks(self.width), max_blocks)
        self.per_block = ceil_div(ceil_div(self.rows, self.number), high) * high
        self.number = ceil_div(self.rows, self.per_block)
        self.grid = (self.number, tiles_of_channels, members)
        self.tile = {"UNIT": unit, "HIGH": high, "WIDE": wide, "num_warps": WARPS}
