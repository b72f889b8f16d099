"""Batch normalisation, with what may follow it: y = relu(norm(x) + other).

A tensor is rows × width, cut into blocks of rows (`_Shape` in training/batch_norm.py). The layer has so many channels;
what is further to the right is zero, and stays so. The width is given in units of 8 (or 1), which lets the compiler
read eight numbers at a time; it and the other sizes are no constants, so that there is less to compile.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("rows", "width", "per_block"))
def moments(x, partial, rows, width, per_block, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Mean and sum of squared distances to it, of each channel, in one block of rows."""
    width *= UNIT
    block = tl.program_id(0)
    own = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = own < width
    count = (block * 0).to(tl.float32)
    mean = tl.zeros([WIDE], tl.float32)
    squares = tl.zeros([WIDE], tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        here = (row < rows)[:, None] & inside[None, :]
        values = tl.load(x + row[:, None] * width + own[None, :], mask=here, other=0.0).to(tl.float32)
        number = tl.minimum(tl.maximum(rows - block * per_block - start, 0), HIGH).to(tl.float32)
        tile_mean = tl.sum(values, 0) / tl.maximum(number, 1.0)
        away = tl.where(here, values - tile_mean[None, :], 0.0)
        total = tl.maximum(count + number, 1.0)
        gap = tile_mean - mean
        squares += tl.sum(away * away, 0) + gap * gap * (count * number / total)
        mean += gap * (number / total)
        count += number
    place = block * width + own
    tl.store(partial + place, mean, mask=inside)
    tl.store(partial + tl.num_programs(0) * width + place, squares, mask=inside)


@triton.jit(do_not_specialize=("rows", "width", "channels", "per_block", "blocks", "eps", "momentum"))
def normalize(
    x, other, partial, weight, bias, y, saved, running_mean, running_var,
    rows, width, channels, per_block, blocks, eps, momentum,
    ADD: tl.constexpr, RELU: tl.constexpr, BLOCKS: tl.constexpr,
    UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merge the blocks' moments and normalise one block of rows; the first also updates the running statistics."""
    width *= UNIT
    block = tl.program_id(0)
    own = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = own < width
    known = own < channels
    part = tl.arange(0, BLOCKS)
    there = (part < blocks)[:, None] & inside[None, :]
    place = part[:, None] * width + own[None, :]
    means = tl.load(partial + place, mask=there, other=0.0)
    squares = tl.load(partial + blocks * width + place, mask=there, other=0.0)
    counts = tl.minimum(tl.maximum(rows - part * per_block, 0), per_block).to(tl.float32)
    counts = tl.where(part < blocks, counts, 0.0)
    total = rows.to(tl.float32)
    mean = tl.sum(means * counts[:, None], 0) / total
    gaps = tl.where(there, means - mean[None, :], 0.0)
    spread = tl.sum(squares + gaps * gaps * counts[:, None], 0)
    scale = 1 / tl.sqrt(spread / total + eps)
    if block == 0:
        tl.store(saved + own, mean, mask=inside)
        tl.store(saved + width + own, scale, mask=inside)
        old_mean = tl.load(running_mean + own, mask=known)
        old_var = tl.load(running_var + own, mask=known)
        tl.store(running_mean + own, old_mean + momentum * (mean - old_mean), mask=known)
        tl.store(running_var + own, old_var + momentum * (spread / (total - 1) - old_var), mask=known)
    factor = scale * tl.load(weight + own, mask=known, other=0.0)
    shift = tl.load(bias + own, mask=known, other=0.0)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        here = (row < rows)[:, None] & inside[None, :]
        where = row[:, None] * width + own[None, :]
        values = tl.load(x + where, mask=here, other=0.0).to(tl.float32)
        result = (values - mean[None, :]) * factor[None, :] + shift[None, :]
        if ADD:
            result += tl.load(other + where, mask=here, other=0.0).to(tl.float32)
        if RELU:
            result = tl.where(result < 0, 0.0, result)  # what is no number stays so
        tl.store(y + where, result.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=("rows", "width", "channels", "per_block"))
def sums(
    x, y, dy, saved, weight, bias, partial, dother,
    rows, width, channels, per_block,
    ADD: tl.constexpr, RELU: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The derivatives of weight and bias, as far as one block of rows gives them.

    Where a ReLU let nothing through is seen from x, or, after a sum, from y; then that of `other` is written, too.
    """
    width *= UNIT
    block = tl.program_id(0)
    own = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = own < width
    mean = tl.load(saved + own, mask=inside, other=0.0)
    scale = tl.load(saved + width + own, mask=inside, other=0.0)
    factor = scale * tl.load(weight + own, mask=own < channels, other=0.0)
    shift = tl.load(bias + own, mask=own < channels, other=0.0)
    for_weight = tl.zeros([WIDE], tl.float32)
    for_bias = tl.zeros([WIDE], tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        here = (row < rows)[:, None] & inside[None, :]
        where = row[:, None] * width + own[None, :]
        values = tl.load(x + where, mask=here, other=0.0).to(tl.float32)
        slopes = tl.load(dy + where, mask=here, other=0.0).to(tl.float32)
        if RELU:
            if ADD:
                result = tl.load(y + where, mask=here, other=0.0)
            else:
                result = (values - mean[None, :]) * factor[None, :] + shift[None, :]
            slopes = tl.where(result.to(y.dtype.element_ty) <= 0, 0.0, slopes)
            if ADD:
                tl.store(dother + where, slopes.to(dother.dtype.element_ty), mask=here)
        for_weight += tl.sum(slopes * (values - mean[None, :]) * scale[None, :], 0)
        for_bias += tl.sum(slopes, 0)
    place = block * width + own
    tl.store(partial + place, for_weight, mask=inside)
    tl.store(partial + tl.num_programs(0) * width + place, for_bias, mask=inside)


@triton.jit(do_not_specialize=("rows", "width", "channels", "per_block", "blocks"))
def derive(
    x, dy, saved, partial, weight, bias, dx, derivatives,
    rows, width, channels, per_block, blocks,
    RELU: tl.constexpr, BLOCKS: tl.constexpr, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Merge the blocks' sums and give the derivative of one block of rows; the first writes those of the parameters.

    RELU: whether one is still to be counted in, with nothing added before it.
    """
    width *= UNIT
    block = tl.program_id(0)
    own = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = own < width
    known = own < channels
    part = tl.arange(0, BLOCKS)
    there = (part < blocks)[:, None] & inside[None, :]
    place = part[:, None] * width + own[None, :]
    for_weight = tl.sum(tl.load(partial + place, mask=there, other=0.0), 0)
    for_bias = tl.sum(tl.load(partial + blocks * width + place, mask=there, other=0.0), 0)
    if block == 0:
        tl.store(derivatives + own, for_weight, mask=known)
        tl.store(derivatives + channels + own, for_bias, mask=known)
    mean = tl.load(saved + own, mask=inside, other=0.0)
    scale = tl.load(saved + width + own, mask=inside, other=0.0)
    factor = scale * tl.load(weight + own, mask=known, other=0.0)
    shift = tl.load(bias + own, mask=known, other=0.0)
    total = rows.to(tl.float32)
    for start in range(0, per_block, HIGH):
        row = block * per_block + start + tl.arange(0, HIGH)
        here = (row < rows)[:, None] & inside[None, :]
        where = row[:, None] * width + own[None, :]
        values = tl.load(x + where, mask=here, other=0.0).to(tl.float32)
        slopes = tl.load(dy + where, mask=here, other=0.0).to(tl.float32)
        if RELU:
            result = (values - mean[None, :]) * factor[None, :] + shift[None, :]
            slopes = tl.where(result.to(dx.dtype.element_ty) <= 0, 0.0, slopes)
        normal = (values - mean[None, :]) * scale[None, :]
        result = factor[None, :] * (slopes - (for_bias[None, :] + normal * for_weight[None, :]) / total)
        tl.store(dx + where, result.to(dx.dtype.element_ty), mask=here)
