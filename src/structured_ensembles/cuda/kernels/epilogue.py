"""Epilogues of convolutions: what is computed while a tile of outputs is still in registers.

EPILOGUE 0: nothing more. 1: the moments that a batch norm needs. 2, in the backward pass: the sums that the gradient
of a batch norm needs, behind its ReLU. 3, in prediction: a batch norm by its running statistics. 4: a bias. MASK: how
the gradient of the ReLU is found in the backward pass; 0: there is none, 1: from the norm's input, 2: from its output.
cuda/convolution.py has names for these numbers.
"""

import triton
import triton.language as tl


@triton.jit
def add_tile_moments(values, valid, number, count, mean, squares):
    """Merge a tile's mean and sum of squared deviations into those of the tiles before it (Chan et al. 1979)."""
    tile_mean = tl.sum(tl.where(valid, values, 0.0), 0) / tl.maximum(number, 1.0)
    deviation = tl.where(valid, values - tile_mean[None, :], 0.0)
    total = tl.maximum(count + number, 1.0)
    gap = tile_mean - mean
    squares += tl.sum(deviation * deviation, 0) + gap * gap * (count * number / total)
    mean += gap * (number / total)
    return count + number, mean, squares


@triton.jit
def to_tf32(values):
    """Round float32 to the nearest number of TF32 (10 bits of mantissa); tensor cores would cut the others off."""
    bits = values.to(tl.int32, bitcast=True)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    return tl.where(finite, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mask_gradient(gradient, before, norm_output, there, mean, factor, shift, y, MASK: tl.constexpr):
    """Return the gradient before a ReLU, which MASK 1 finds from the norm's input, `before`, and 2 from its output."""
    if MASK == 1:
        after = (before - mean[None, :]) * factor[None, :] + shift[None, :]
        gradient = tl.where(after.to(y.dtype.element_ty) <= 0, 0.0, gradient)
    if MASK == 2:
        gradient = tl.where(tl.load(norm_output, mask=there, other=0.0) <= 0, 0.0, gradient)
    return gradient


@triton.jit
def finish_tile(
    total, at, there, y, other, norm_input, norm_output, mean, scale, factor, shift, left, right,
    ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr, RELU: tl.constexpr = False,
    TF32: tl.constexpr = False, LATE: tl.constexpr = True,
):  # fmt: skip
    """Store a tile of outputs, total (pixels, outputs), and add its statistics to left and right, of the same shape.

    Narrow layers sum them over pixels only once, at the end: a sum over a tile makes all threads wait.
    EPILOGUE 1: deviations from `mean`, a guess of the mean of each output, and their squares. 2: the gradients of a
    batch norm's weight and bias. 3 and 4 have no statistics. TF32: round what is stored, for the next convolution.
    LATE: mask the rounded result. Masking `total` makes a compiler wait for each matrix product of a warp group (C7514
    of ptxas); the result is the same.
    """
    if EPILOGUE == 3:
        total = total * factor[None, :] + shift[None, :]
    if EPILOGUE == 4:
        total += shift[None, :]
    if ADD:
        total += tl.load(other + at, mask=there, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        before = tl.load(norm_input + at, mask=there, other=0.0).to(tl.float32)
        if not LATE:
            total = mask_gradient(total, before, norm_output + at, there, mean, factor, shift, y, MASK)
    if RELU:
        total = tl.where(total <= 0, 0.0, total)  # a NaN stays one
    if TF32:
        total = to_tf32(total)
    result = total.to(y.dtype.element_ty)
    if EPILOGUE == 2 and LATE:
        rounded = mask_gradient(result.to(tl.float32), before, norm_output + at, there, mean, factor, shift, y, MASK)
        result = rounded.to(y.dtype.element_ty)
    tl.store(y + at, result, mask=there)
    stored = result.to(tl.float32)  # statistics are those of the numbers that are stored
    if EPILOGUE == 1:
        deviation = tl.where(there, stored - mean[None, :], 0.0)
        left += deviation
        right += deviation * deviation
    if EPILOGUE == 2:
        stored = tl.where(there, stored, 0.0)
        left += stored * ((before - mean[None, :]) * scale[None, :])
        right += stored
    return left, right


@triton.jit
def store_statistics(
    partial, block, member, output, outputs, sums, count, mean, known, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Store the statistics of a program; partial: (members, 3, blocks, outputs).

    sums: what `finish_tile` has added to left and to right, summed over pixels. EPILOGUE 1: stores the mean, squared
    deviations from it, and the number of pixels. 2: the two sums.
    """
    first, second = sums
    if EPILOGUE == 1:
        gap = first / tl.maximum(count, 1.0)
        second = tl.maximum(second - first * gap, 0.0)
        first = mean + gap
    store_block(partial, block, member, output, outputs, first, second, count, known)


@triton.jit
def store_block(partial, block, member, output, outputs, first, second, count, known):
    """Store the statistics of one block; partial: (members, 3, blocks, outputs)."""
    blocks = tl.num_programs(0)
    at = (member * 3 * blocks + block) * outputs + output
    tl.store(partial + at, first, mask=known)
    tl.store(partial + blocks * outputs + at, second, mask=known)
    tl.store(partial + 2 * blocks * outputs + at, first * 0 + count, mask=known)


@triton.jit
def epilogue_constants(
    pivot, saved, norm_weight, norm_bias, member, output, outputs, known, eps,
    EPILOGUE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load the constants of `finish_tile` for each output: mean (or a guess), and a norm's factors.

    EPILOGUE 3: pivot and saved are the running mean and variance, (members, outputs). 4: norm_bias is the bias.
    """
    mean = tl.zeros([WIDE], tl.float32)
    scale = mean
    factor = mean
    shift = mean
    if EPILOGUE == 1:
        mean = tl.load(pivot + member * outputs + output, mask=known, other=0.0)
    if EPILOGUE == 2:
        mean = tl.load(saved + member * 2 * outputs + output, mask=known, other=0.0)
        scale = tl.load(saved + (member * 2 + 1) * outputs + output, mask=known, other=0.0)
        factor = scale * tl.load(norm_weight + member * outputs + output, mask=known, other=0.0)
        shift = tl.load(norm_bias + member * outputs + output, mask=known, other=0.0)
    if EPILOGUE == 3:
        at = member * outputs + output
        mean = tl.load(pivot + at, mask=known, other=0.0).to(tl.float32)
        variance = tl.load(saved + at, mask=known, other=1.0).to(tl.float32)
        factor = tl.load(norm_weight + at, mask=known, other=0.0).to(tl.float32) / tl.sqrt(variance + eps)
        shift = tl.load(norm_bias + at, mask=known, other=0.0).to(tl.float32) - mean * factor
    if EPILOGUE == 4:
        shift = tl.load(norm_bias + member * outputs + output, mask=known, other=0.0).to(tl.float32)
    return mean, scale, factor, shift
