"""Operations of a program, beside PyTorch's own: with the member as an axis of the weights, and fused.

Each is a plain function, written here with PyTorch's operations: what it computes, on any device and in any precision.
running.py replaces them by kernels (convolution.py, batch_norm.py) where these fit. Activations of all members are one
batch, (members × images, …), member after member; weights and statistics are stacked, (members, …).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.common.member_rows import scale_rows


def member_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve each member's images with its weights.

    x: (members × images, inputs, height, width). weight: (members, outputs, inputs, rows, taps). bias: (members,
    outputs).
    """
    batches = x.chunk(len(weight)) if len(weight) > 1 else (x,)
    biases = [None] * len(weight) if bias is None else list(bias)
    results = [
        F.conv2d(batch, filters, shift, stride, padding)
        for batch, filters, shift in zip(batches, weight, biases, strict=True)
    ]
    return torch.cat(results) if len(results) > 1 else results[0]


def scaled_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor, *, stride: int = 1, padding: int = 0
) -> Tensor:
    """Convolve with weights that all members share, and scale each member's outputs.

    x: (members × images, inputs, height, width). weight: (1, outputs, inputs, rows, taps). bias: (1, outputs).
    factors: (members, outputs). The kernels scale the weights instead, which are fewer numbers than the outputs.
    """
    return scale_rows(member_conv(x, weight, bias, stride=stride, padding=padding), factors, dim=-3)


def member_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    add: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
    relu: bool = False,
) -> Tensor:
    """Normalise each member's images as batch norm does in training, add `add` (of the shape of x), apply the ReLU.

    x: (members × images, channels, height, width). weight, bias, running_mean, running_var: (members, channels); the
    latter two are updated in place.
    """
    batches = x.chunk(len(weight)) if len(weight) > 1 else (x,)
    results = [
        F.batch_norm(batch, mean, var, scale, shift, True, momentum, eps)
        for batch, scale, shift, mean, var in zip(batches, weight, bias, running_mean, running_var, strict=True)
    ]
    y = torch.cat(results) if len(results) > 1 else results[0]
    if add is not None:
        y = y + add
    return F.relu(y) if relu else y


def conv_norm(
    x: Tensor,
    conv_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    add: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    momentum: float,
    eps: float,
    relu: bool = False,
) -> Tensor:
    """Convolve, then batch norm, sum and ReLU: `member_norm(member_conv(x, conv_weight), …)`."""
    y = member_conv(x, conv_weight, stride=stride, padding=padding)
    return member_norm(y, weight, bias, running_mean, running_var, add, momentum=momentum, eps=eps, relu=relu)


def running_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    add: Tensor | None = None,
    *,
    eps: float,
    relu: bool = False,
) -> Tensor:
    """Normalise each member's samples as batch norm does in evaluation, add `add`, apply the ReLU.

    x: (members × samples, channels, …). weight, bias, running_mean, running_var: (members, channels).
    """
    factor = (running_var + eps).rsqrt()
    factor = factor if weight is None else weight * factor
    shift = -running_mean * factor if bias is None else bias - running_mean * factor
    members, channels = running_mean.shape
    shape = (members, 1, channels, *[1] * (x.dim() - 2))
    samples = x.unflatten(0, (members, -1))
    y = torch.addcmul(shift.view(shape), samples, factor.view(shape)).flatten(0, 1).to(x.dtype)
    if add is not None:
        y = y + add
    return F.relu(y) if relu else y


def predict_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    add: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    eps: float = 0.0,
    relu: bool = False,
    shared: bool = False,
) -> Tensor:
    """Convolve, then batch norm by its running statistics, sum and ReLU, each where it is given.

    x: (members × images, …); shared: (images, …), the same for all members. Without running_mean there is no norm.
    """
    y = member_conv(repeat_members(x, len(weight)) if shared else x, weight, bias, stride=stride, padding=padding)
    if running_mean is not None:
        assert running_var is not None
        return running_norm(y, norm_weight, norm_bias, running_mean, running_var, add, eps=eps, relu=relu)
    if add is not None:
        y = y + add
    return F.relu(y) if relu else y


def repeat_members(x: Tensor, members: int) -> Tensor:
    """Repeat a batch that all members share: (samples, …) to (members × samples, …)."""
    return torch.cat([x] * members) if members > 1 else x


def split_members(x: Tensor, members: int) -> Tensor:
    """Cut a batch of all members up: (members × samples, …) to (members, samples, …)."""
    return x.unflatten(0, (members, -1))


def rank_one_weights(weight: Tensor, input_factors: Tensor, output_factors: Tensor) -> Tensor:
    """Return the weights of members that share one but for rank-one factors, (members, outputs, inputs, …).

    weight: (1, outputs, inputs, …). input_factors: (1, members, inputs). output_factors: (1, members, outputs). To
    multiply the weight costs less than to multiply the images before and after the layer, which are larger.
    """
    factors = output_factors[0, :, :, None] * input_factors[0, :, None, :]
    return (weight * factors.view(*factors.shape, *[1] * (weight.dim() - 3))).to(weight.dtype)


def add_member_bias(x: Tensor, biases: Tensor) -> Tensor:
    """Add the members' biases (1, members, outputs) to x: images (members × images, outputs, …), or rows of outputs."""
    _, members, outputs = biases.shape
    shape = (members, 1, outputs, 1, 1) if x.dim() == 4 else (members, *[1] * (x.dim() - 1), outputs)
    return (x.unflatten(0, (members, -1)) + biases.view(shape).to(x.dtype)).flatten(0, 1)


def member_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply each member's linear layer: x (members × samples, …, inputs), weight (members, outputs, inputs)."""
    members, outputs, inputs = weight.shape
    if members == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    rows = x.reshape(members, -1, inputs)
    if bias is None:
        y = torch.bmm(rows, weight.transpose(1, 2))
    else:
        y = torch.baddbmm(bias[:, None].to(rows.dtype), rows, weight.transpose(1, 2))
    return y.reshape(*x.shape[:-1], outputs)


def member_dropout(x: Tensor, generators: Sequence[torch.Generator | None], p: float) -> Tensor:
    """Drop elements of x, each member's by its own generator: the mask is that of the network trained alone."""
    mask = torch.empty_like(x)
    for member_mask, generator in zip(mask.chunk(len(generators)), generators, strict=True):
        member_mask.bernoulli_(1 - p, generator=generator)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0)


def subsample(x: Tensor, stride: int, channels: int) -> Tensor:
    """Take every stride-th pixel of x (images, inputs, height, width), and append zeros up to so many channels."""
    return F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, channels - x.shape[1]))
