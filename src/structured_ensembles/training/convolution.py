"""The derivative of a convolution with few channels, which cuDNN finds hard.

A layer of 8 and 16 channels on 32×32 images has a thousand weights, and sums over a hundred thousand pixels for each:
cuDNN's kernels for it take 100 to 200 µs on an H200, ours about a tenth. All else about a convolution is cuDNN's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_CHANNELS = 32
MOST_BLOCKS = 128  # of pixels, each summed by one program


def replaceable(network: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a network that we can do better; none where there is no Triton."""
    if find_spec("triton") is None:
        return []
    ordinary = [module for module in network.modules() if type(module) is nn.Conv2d]
    return [
        module
        for module in ordinary
        if max(module.in_channels, module.out_channels) <= MOST_CHANNELS
        and module.groups == 1
        and module.bias is None
        and module.dilation == (1, 1)
        and module.stride[0] == module.stride[1]
        and not isinstance(module.padding, str)
        and module.padding[0] == module.padding[1]
        and module.padding_mode == "zeros"
    ]


def fits(x: Tensor, module: nn.Conv2d) -> bool:
    """Whether `convolution` can do it; otherwise the module is as good."""
    casting = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return (
        x.is_cuda
        and x.dim() == 4
        and max(x.numel(), x.numel() // module.in_channels * module.out_channels) < 2**30  # kernels count in 32 bits
        and casting
        and module.weight.dtype == torch.bfloat16
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def convolution(x: Tensor, module: nn.Conv2d) -> Tensor:
    """What `module` makes of x (batch, channels, height, width) under autocast."""
    assert not isinstance(module.padding, str)
    return _Convolution.apply(x.bfloat16(), module.weight, module.stride[0], module.padding[0])  # type: ignore[no-any-return]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.convolution_backward(
                dy, x, weight, None, [ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1, [True, False, False]
            )[0]
        dw = weight_gradient(x, dy, weight, ctx.stride, ctx.padding) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The derivative of `weight`, from x (batch, inputs, …) and dy (batch, outputs, …), both channels last."""
    from structured_ensembles.training.kernels.weight_gradient import merge, products

    outputs, inputs, high, wide = weight.shape
    pixels = dy.numel() // outputs
    columns = high * wide * inputs
    deep = 64
    per_block = max(-(-pixels // (MOST_BLOCKS * deep)), 4) * deep
    blocks = -(-pixels // per_block)
    width = min(128, _power_of_two(columns))
    partial = torch.empty(blocks, outputs, columns, device=x.device)
    products[blocks, -(-columns // width)](
        x, dy, partial, pixels, x.shape[2], x.shape[3], dy.shape[2], dy.shape[3], stride, padding, per_block,
        TAPS_WIDE=wide, INPUTS=inputs, OUTPUTS=outputs, COLUMNS=columns,
        HIGH=max(16, _power_of_two(outputs)), WIDE=max(16, width), DEEP=deep,
    )  # fmt: skip
    result = torch.empty(outputs, high, wide, inputs, device=x.device, dtype=weight.dtype).permute(0, 3, 1, 2)
    merge[(-(-outputs * columns // 32),)](partial, result, outputs * columns, blocks, HIGH=64, WIDE=32)
    return result


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
