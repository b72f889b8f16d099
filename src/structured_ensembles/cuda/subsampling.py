"""Every second pixel and channels of zeros, the shortcut of a ResNet without parameters, in one launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structured_ensembles.cuda.launch import empty, launch
from structured_ensembles.cuda.launch_grid import ceil_div, power_of_two


def subsample(x: Tensor, stride: int, channels: int) -> Tensor:
    """Take every stride-th pixel of x (images, inputs, height, width), and append channels of zeros."""
    height, width = (ceil_div(size, stride) for size in x.shape[2:])
    y = empty(len(x), channels, height, width, like=x, dtype=x.dtype, channels_last=True)
    _subsample(x, y, stride, backward=False)
    return y


def subsample_gradient(dy: Tensor, stride: int, shape: torch.Size) -> Tensor:
    """Return the gradient of the inputs of `subsample`, whose shape is (images, inputs, height, width)."""
    dx = empty(*shape, like=dy, dtype=dy.dtype, channels_last=True)
    _subsample(dx, dy, stride, backward=True)
    return dx


def _subsample(x: Tensor, y: Tensor, stride: int, backward: bool) -> None:
    """Launch the kernel that fills y from x; backward, that fills the gradient x from the gradient y."""
    from structured_ensembles.cuda.kernels.subsampling import subsample as kernel

    images, channels, height, width = x.shape
    wide = power_of_two(max(channels, y.shape[1]))
    unit = math.gcd(8, channels, y.shape[1])
    high = max(4096 // wide, 1)
    pixels = (x if backward else y).numel() // (channels if backward else y.shape[1])
    launch(
        kernel, (ceil_div(pixels, high),),
        x, y, images, channels // unit, y.shape[1] // unit, HEIGHT=height, WIDTH=width, UNIT=unit,
        STRIDE=stride, BACKWARD=backward, OUT_WIDTH=y.shape[3], OUT_PIXELS=y.shape[2] * y.shape[3],
        HIGH=high, WIDE=wide,
    )  # fmt: skip
