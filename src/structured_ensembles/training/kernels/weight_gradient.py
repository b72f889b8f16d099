"""The derivative of a convolution's weights: a matrix product over all pixels, cut into blocks of pixels."""

import triton
import triton.language as tl


@triton.jit
def products(
    x, dy, partial,
    pixels, height, width, out_height, out_width, stride, padding, per_block,
    TAPS_WIDE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One block of output pixels: Σ dy[pixel, output] · x[the pixel's neighbour at a tap, input].

    x: (batch, height, width, INPUTS); dy: (pixels, OUTPUTS); partial: (blocks, OUTPUTS, COLUMNS), a column being a tap
    of the kernel and an input channel.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    tap = column // INPUTS
    channel = column % INPUTS
    down = tap // TAPS_WIDE - padding
    right = tap % TAPS_WIDE - padding
    output = tl.arange(0, HIGH)
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, per_block, DEEP):
        pixel = block * per_block + start + tl.arange(0, DEEP)
        there = pixel < pixels
        image = pixel // (out_height * out_width)
        place = pixel % (out_height * out_width)
        row = (place // out_width * stride)[:, None] + down[None, :]
        at = (place % out_width * stride)[:, None] + right[None, :]
        inside = there[:, None] & (column < COLUMNS)[None, :]
        inside = inside & (row >= 0) & (row < height) & (at >= 0) & (at < width)
        where = ((image[:, None] * height + row) * width + at) * INPUTS + channel[None, :]
        values = tl.load(x + where, mask=inside, other=0.0)
        slopes = tl.load(
            dy + pixel[None, :] * OUTPUTS + output[:, None],
            mask=there[None, :] & (output < OUTPUTS)[:, None],
            other=0.0,
        )
        total += tl.dot(slopes, values)
    place = (block * OUTPUTS + output[:, None]) * COLUMNS + column[None, :]
    tl.store(partial + place, total, mask=(output < OUTPUTS)[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def merge(partial, result, size, blocks, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The sum over the blocks: partial (blocks, size) gives result (size,)."""
    own = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = own < size
    total = tl.zeros([WIDE], tl.float32)
    for start in range(0, blocks, HIGH):
        block = start + tl.arange(0, HIGH)
        there = (block < blocks)[:, None] & inside[None, :]
        total += tl.sum(tl.load(partial + block[:, None] * size + own[None, :], mask=there, other=0.0), 0)
    tl.store(result + own, total.to(result.dtype.element_ty), mask=inside)
