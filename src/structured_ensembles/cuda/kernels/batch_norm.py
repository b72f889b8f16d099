"""Batch norm of all members in one launch, with what may follow it: y = relu(norm(x) + other).

A tensor is members × rows × width, its rows cut into blocks (`Blocks` in cuda/batch_norm.py); the launch grid is
(blocks, tiles of channels, members). The width is given in units of 8 (or 1), which lets the compiler load eight
numbers at a time; it and the other sizes are not constants, so that one compiled kernel serves many layers.
"""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.epilogue import add_tile_moments, store_block
from structured_ensembles.cuda.kernels.order import wait_for_earlier


@triton.jit(do_not_specialize=("rows", "width", "per_block"))
def moments(
    x, partial, rows, width, per_block, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute mean and squared deviations of each channel of one block of rows, partial (members, 3, blocks, width)."""
    wait_for_earlier(DEPENDENT)
    width *= UNIT
    block = tl.program_id(0)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    member = tl.program_id(2)
    inside = channel < width
    x += (member * rows).to(tl.int64) * width
    count = (block * 0).to(tl.float32)
    mean = tl.zeros([WIDE], tl.float32)
    squares = tl.zeros([WIDE], tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        valid = (row < rows)[:, None] & inside[None, :]
        values = tl.load(x + row[:, None] * width + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        number = tl.minimum(tl.maximum(rows - block * per_block - start, 0), HIGH).to(tl.float32)
        count, mean, squares = add_tile_moments(values, valid, number, count, mean, squares)
    store_block(partial, block, member, channel, width, mean, squares, count, inside)


@triton.jit(do_not_specialize=("rows", "width", "per_block", "blocks", "eps", "momentum"))
def normalize(
    x, other, partial, weight, bias, y, saved, running_mean, running_var,
    rows, width, per_block, blocks, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCKS: tl.constexpr,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Merge the moments of all blocks and normalise one block of rows; block 0 also updates the running statistics.

    partial: (members, 3, blocks, width): mean, squared deviations, and rows of each block. weight, bias, running_mean,
    running_var: (members, width). saved: (members, 2, width), mean and 1 / deviation.
    """
    wait_for_earlier(DEPENDENT)
    width *= UNIT
    block = tl.program_id(0)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    member = tl.program_id(2)
    inside = channel < width
    mean = tl.zeros([WIDE], tl.float32)
    spread = tl.zeros([WIDE], tl.float32)
    seen = tl.zeros([WIDE], tl.float32)
    for start in range(0, blocks, BLOCKS):
        merged = start + tl.arange(0, BLOCKS)
        there = (merged < blocks)[:, None] & inside[None, :]
        place = (member * 3 * blocks + merged)[:, None] * width + channel[None, :]
        means = tl.load(partial + place, mask=there, other=0.0)
        squares = tl.load(partial + blocks * width + place, mask=there, other=0.0)
        counts = tl.load(partial + 2 * blocks * width + place, mask=there, other=0.0)
        number = tl.sum(counts, 0)
        merged_mean = tl.sum(means * counts, 0) / tl.maximum(number, 1.0)
        gaps = tl.where(there, means - merged_mean[None, :], 0.0)
        gap = merged_mean - mean
        together = tl.maximum(seen + number, 1.0)
        spread += tl.sum(squares + gaps * gaps * counts, 0) + gap * gap * (seen * number / together)
        mean += gap * (number / together)
        seen += number
    total = rows.to(tl.float32)
    scale = 1 / tl.sqrt(spread / total + eps)
    at_channel = member * width + channel
    if block == 0:
        tl.store(saved + member * width + at_channel, mean, mask=inside)
        tl.store(saved + (member + 1) * width + at_channel, scale, mask=inside)
        old_mean = tl.load(running_mean + at_channel, mask=inside)
        old_var = tl.load(running_var + at_channel, mask=inside)
        tl.store(running_mean + at_channel, old_mean + momentum * (mean - old_mean), mask=inside)
        tl.store(running_var + at_channel, old_var + momentum * (spread / (total - 1) - old_var), mask=inside)
    factor = scale * tl.load(weight + at_channel, mask=inside, other=0.0)
    shift = tl.load(bias + at_channel, mask=inside, other=0.0)
    first = (member * rows).to(tl.int64) * width
    x += first
    other += first
    y += first
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        valid = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + channel[None, :]
        values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        result = (values - mean[None, :]) * factor[None, :] + shift[None, :]
        if ADD:
            result += tl.load(other + at, mask=valid, other=0.0).to(tl.float32)
        if RELU:
            result = tl.where(result < 0, 0.0, result)  # NaN stays NaN
        tl.store(y + at, result.to(y.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=("rows", "width", "per_block"))
def gradient_sums(
    x, y, dy, saved, weight, bias, partial, masked,
    rows, width, per_block,
    MASK: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute gradients of weight and bias from one block of rows; partial: (members, 3, blocks, width).

    MASK: 0: no ReLU; the gradient of the ReLU is found from x (1) or from the output y (2), and its input's gradient is
    written to `masked`.
    """
    wait_for_earlier(DEPENDENT)
    width *= UNIT
    block = tl.program_id(0)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    member = tl.program_id(2)
    inside = channel < width
    at_channel = member * width + channel
    mean = tl.load(saved + member * width + at_channel, mask=inside, other=0.0)
    scale = tl.load(saved + (member + 1) * width + at_channel, mask=inside, other=0.0)
    factor = scale * tl.load(weight + at_channel, mask=inside, other=0.0)
    shift = tl.load(bias + at_channel, mask=inside, other=0.0)
    first = (member * rows).to(tl.int64) * width
    x += first
    y += first
    dy += first
    masked += first
    for_weight = tl.zeros([HIGH, WIDE], tl.float32)
    for_bias = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        valid = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + channel[None, :]
        values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        gradients = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32)
        if MASK == 1:
            result = (values - mean[None, :]) * factor[None, :] + shift[None, :]
            gradients = tl.where(result.to(x.dtype.element_ty) <= 0, 0.0, gradients)
        if MASK == 2:
            gradients = tl.where(tl.load(y + at, mask=valid, other=0.0) <= 0, 0.0, gradients)
        if MASK != 0:
            tl.store(masked + at, gradients.to(masked.dtype.element_ty), mask=valid)
        for_weight += gradients * ((values - mean[None, :]) * scale[None, :])
        for_bias += gradients
    store_block(partial, block, member, channel, width, tl.sum(for_weight, 0), tl.sum(for_bias, 0), 0.0, inside)


@triton.jit(do_not_specialize=("rows", "width", "per_block", "blocks"))
def input_gradient(
    x, dy, saved, partial, weight, dx, parameter_gradients,
    rows, width, per_block, blocks,
    BLOCKS: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Merge the sums of all blocks and compute dx of one block of rows; block 0 writes the parameters' gradients.

    dy: of the ReLU's input. parameter_gradients: (2, members, width), those of weight and bias.
    """
    wait_for_earlier(DEPENDENT)
    width *= UNIT
    block = tl.program_id(0)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    member = tl.program_id(2)
    inside = channel < width
    for_weight = tl.zeros([WIDE], tl.float32)
    for_bias = tl.zeros([WIDE], tl.float32)
    for start in range(0, blocks, BLOCKS):
        merged = start + tl.arange(0, BLOCKS)
        there = (merged < blocks)[:, None] & inside[None, :]
        place = (member * 3 * blocks + merged)[:, None] * width + channel[None, :]
        for_weight += tl.sum(tl.load(partial + place, mask=there, other=0.0), 0)
        for_bias += tl.sum(tl.load(partial + blocks * width + place, mask=there, other=0.0), 0)
    at_channel = member * width + channel
    if block == 0:
        tl.store(parameter_gradients + at_channel, for_weight, mask=inside)
        tl.store(parameter_gradients + tl.num_programs(2) * width + at_channel, for_bias, mask=inside)
    mean = tl.load(saved + member * width + at_channel, mask=inside, other=0.0)
    scale = tl.load(saved + (member + 1) * width + at_channel, mask=inside, other=0.0)
    factor = scale * tl.load(weight + at_channel, mask=inside, other=0.0)
    first = (member * rows).to(tl.int64) * width
    x += first
    dy += first
    dx += first
    bias_mean = for_bias / rows.to(tl.float32)
    weight_mean = for_weight * scale / rows.to(tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        valid = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + channel[None, :]
        values = tl.load(x + at, mask=valid, other=0.0).to(tl.float32)
        gradients = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32)
        away = bias_mean[None, :] + (values - mean[None, :]) * weight_mean[None, :]
        result = factor[None, :] * (gradients - away)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=valid)
