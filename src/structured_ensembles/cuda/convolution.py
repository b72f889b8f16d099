"""Convolutions of few channels, which cuDNN finds hard.

A layer of 16 and 8 channels on 32×32 images has a thousand weights, and cuDNN's kernels, made for many channels, leave
most of a GPU idle. A step of five ResNet20s took 3.6 ms with them (all but the weights' derivatives) on an H200, and
takes 2.6 ms with ours and with what pending.py saves (benchmarks/results/fleet-h200.json, before and after).
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from structured_ensembles.cuda.launch_grid import divided, in_units, power_of_two

MOST_BLOCKS = 256  # of pixels, each summed by one program
DEEP = 64  # pixels that a program takes at a time, for the weights' derivatives
HIGH = 64  # pixels of a program, otherwise


def replaceable(network: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a network that we can do better; none where there is no Triton."""
    if find_spec("triton") is None:
        return []
    ordinary = [module for module in network.modules() if type(module) is nn.Conv2d]
    return [
        module
        for module in ordinary
        if _few(module.weight)
        and module.groups == 1
        and module.bias is None
        and module.dilation == (1, 1)
        and module.stride[0] == module.stride[1]
        and not isinstance(module.padding, str)
        and module.padding[0] == module.padding[1]
        and module.padding_mode == "zeros"
    ]


def _few(weight: Tensor) -> bool:
    """Whether the layer has so few channels that we are faster."""
    outputs, inputs, _, taps = weight.shape
    return max(inputs, outputs) <= 64 and min(inputs, outputs) <= 32 and taps * max(inputs, outputs) <= 256


def fits(x: Tensor, module: nn.Conv2d) -> bool:
    """Whether `convolution` can do it; otherwise the module is as good."""
    casting = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    weight = module.weight
    return (
        x.is_cuda
        and x.dim() == 4
        and x.shape[1] == weight.shape[1]
        and casting
        and _few(weight)
        and weight.dtype == torch.bfloat16
        and x.dtype in (torch.bfloat16, torch.float32)
        and weight.is_contiguous(memory_format=torch.channels_last)
        and 0 < x.numel() < 2**30  # kernels count in 32 bits
        and 0 < math.prod(_shape_of_outputs(x, weight, module.stride[0], module.padding[0])) < 2**30  # type: ignore[arg-type]
    )


def convolution(x: Tensor, module: nn.Conv2d) -> Tensor:
    """What `module` makes of x (batch, channels, height, width) under autocast."""
    assert not isinstance(module.padding, str)
    # The first copies once, if at all, the second what is stored in that order but with gaps.
    halved = x.to(torch.bfloat16, memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)
    return _Convolution.apply(halved, module.weight, module.stride[0], module.padding[0])  # type: ignore[no-any-return]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return outputs_of(x, weight, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = input_gradient(x, dy, weight, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(x, dy, weight, ctx.stride, ctx.padding) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


def outputs_of(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of x (batch, inputs, height, width) by weight (outputs, inputs, rows, taps), channels last."""
    shape = _shape_of_outputs(x, weight, stride, padding)
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    _correlate(x, weight, y, stride, padding, backward=False)
    return y


def _shape_of_outputs(x: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int, int, int]:
    high, wide = (
        max((size + 2 * padding - taps) // stride + 1, 0)
        for size, taps in zip(x.shape[2:], weight.shape[2:], strict=True)
    )
    return len(x), len(weight), high, wide


def input_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The derivative of x, from dy (batch, outputs, …), all channels last."""
    rows, taps = weight.shape[2:]
    if stride == 1 and rows == taps > padding:  # it is a convolution itself
        dx = torch.empty_like(x)
        _correlate(dy, weight, dx, 1, rows - 1 - padding, backward=True)
        return dx
    return _by_cudnn(x, dy, weight, stride, padding, [True, False, False])[0]


def weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The derivative of `weight`, from x (batch, inputs, …) and dy (batch, outputs, …), all channels last."""
    outputs, inputs, rows, taps = weight.shape
    if max(inputs, outputs) > 32 or taps * inputs > 128:
        return _by_cudnn(x, dy, weight, stride, padding, [False, True, False])[1]
    from structured_ensembles.cuda.kernels.convolution import merge, products

    pixels = dy.numel() // outputs
    per_block = max(divided(pixels, MOST_BLOCKS * DEEP), 4) * DEEP
    blocks = divided(pixels, per_block)
    partial = torch.empty(blocks, weight.numel(), device=x.device)
    (input_units, input_unit), (output_units, output_unit) = in_units(inputs), in_units(outputs)
    products[blocks, divided(rows, 3)](
        x, dy, partial, pixels, *x.shape[2:], *dy.shape[2:], stride, padding, input_units, output_units, per_block,
        ROWS=rows, TAPS=taps, INPUT_UNIT=input_unit, OUTPUT_UNIT=output_unit,
        HIGH=_edge(taps * inputs), WIDE=_edge(outputs), DEEP=DEEP, num_warps=4, num_stages=2,
    )  # fmt: skip
    result = torch.empty(outputs, rows, taps, inputs, device=x.device, dtype=weight.dtype).permute(0, 3, 1, 2)
    merge[(divided(weight.numel(), 16),)](partial, result, weight.numel(), blocks, HIGH=MOST_BLOCKS, WIDE=16)
    return result


def _correlate(x: Tensor, weight: Tensor, y: Tensor, stride: int, padding: int, backward: bool) -> None:
    from structured_ensembles.cuda.kernels.convolution import correlate

    inputs, outputs, (rows, taps) = x.shape[1], y.shape[1], weight.shape[2:]
    pixels = y.numel() // outputs
    (input_units, input_unit), (output_units, output_unit) = in_units(inputs), in_units(outputs)
    correlate[(divided(pixels, HIGH),)](
        x, weight, y, pixels, *x.shape[2:], *y.shape[2:], stride, padding, input_units, output_units,
        ROWS=rows, TAPS=taps, INPUT_UNIT=input_unit, OUTPUT_UNIT=output_unit, BACKWARD=backward,
        HIGH=HIGH, WIDE=_edge(outputs), DEEP=_edge(taps * inputs), num_warps=HIGH // 16, num_stages=1,
    )  # fmt: skip


def _by_cudnn(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int, wanted: list[bool]) -> list[Tensor]:
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        dy, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted
    )


def _edge(number: int) -> int:
    """The smallest power of two that is not less, and enough for a product of matrices."""
    return max(16, power_of_two(number))
