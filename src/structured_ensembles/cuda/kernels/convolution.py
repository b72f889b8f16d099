"""Convolutions of few channels, for images stored channels last: matrix products over the neighbours of pixels.

Neighbours in a row of an image lie one after the other in memory, so that a row of the convolution's kernel reads one
piece of it for each pixel: `taps × inputs` numbers, here called columns. Numbers of channels are given in units of 8
(or 1), which lets the compiler read eight at a time, and are no constants, so that it has less to compile.
"""

import triton
import triton.language as tl

SIZES = ("pixels", "height", "width", "out_height", "out_width", "stride", "padding", "inputs", "outputs")


@triton.jit
def neighbours(
    pixel, row, pixels, height, width, out_height, out_width, stride, padding, inputs, columns, WIDE: tl.constexpr
):
    """Where the columns of output pixels lie in x (batch, height, width, inputs), and which are inside the image."""
    image = pixel // (out_height * out_width)
    place = pixel % (out_height * out_width)
    down = place // out_width * stride - padding + row
    right = (place % out_width * stride - padding) * inputs
    column = tl.arange(0, WIDE)
    at = right[:, None] + column[None, :]
    inside = (at >= 0) & (at < width * inputs) & (column < columns)[None, :]
    inside = inside & ((pixel < pixels) & (down >= 0) & (down < height))[:, None]
    return ((image * height + down) * (width * inputs))[:, None] + at, inside


@triton.jit(do_not_specialize=SIZES)
def correlate(
    x, weight, y,
    pixels, height, width, out_height, out_width, stride, padding, inputs, outputs,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr, BACKWARD: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """HIGH output pixels: y[pixel, output] = Σ x[the pixel's neighbour at a tap, input] · weight[output, tap, input].

    x: (batch, height, width, inputs); y: (pixels, outputs); weight: (outputs, ROWS, TAPS, inputs). BACKWARD: x are the
    derivatives of a layer's outputs, y those of its inputs, and weight is the layer's: (inputs, ROWS, TAPS, outputs).
    """
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    columns = TAPS * inputs
    pixel = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    column = tl.arange(0, DEEP)
    output = tl.arange(0, WIDE)
    known = (column < columns)[:, None] & (output < outputs)[None, :]
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for row in range(ROWS):
        where, inside = neighbours(
            pixel, row, pixels, height, width, out_height, out_width, stride, padding, inputs, columns, DEEP
        )
        values = tl.load(x + where, mask=inside, other=0.0)
        if BACKWARD:
            tap = (ROWS - 1 - row) * TAPS + TAPS - 1 - column // inputs
            own = (column % inputs * (ROWS * TAPS) + tap)[:, None] * outputs + output[None, :]
        else:
            own = (output[None, :] * ROWS + row) * columns + column[:, None]
        total += tl.dot(values, tl.load(weight + own, mask=known, other=0.0))
    there = (pixel < pixels)[:, None] & (output < outputs)[None, :]
    tl.store(y + pixel[:, None] * outputs + output[None, :], total.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=(*SIZES, "per_block"))
def products(
    x, dy, partial,
    pixels, height, width, out_height, out_width, stride, padding, inputs, outputs, per_block,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One block of output pixels and three rows: Σ x[the pixel's neighbour at a tap, input] · dy[pixel, output].

    x: (batch, height, width, inputs); dy: (pixels, outputs); partial: (blocks, outputs, ROWS, TAPS, inputs).
    """
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    columns = TAPS * inputs
    block = tl.program_id(0)
    row = tl.program_id(1) * 3
    column = tl.arange(0, HIGH)
    output = tl.arange(0, WIDE)
    first = tl.zeros([HIGH, WIDE], tl.float32)
    second = tl.zeros([HIGH, WIDE], tl.float32)
    third = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, per_block, DEEP):
        pixel = block * per_block + start + tl.arange(0, DEEP)
        there = (pixel < pixels)[:, None] & (output < outputs)[None, :]
        slopes = tl.load(dy + pixel[:, None] * outputs + output[None, :], mask=there, other=0.0)
        where, inside = neighbours(
            pixel, row, pixels, height, width, out_height, out_width, stride, padding, inputs, columns, HIGH
        )
        first += tl.dot(tl.trans(tl.load(x + where, mask=inside, other=0.0)), slopes)
        if ROWS > 1:
            where, inside = neighbours(
                pixel, row + 1, pixels, height, width, out_height, out_width, stride, padding, inputs, columns, HIGH
            )
            second += tl.dot(tl.trans(tl.load(x + where, mask=inside, other=0.0)), slopes)
        if ROWS > 2:
            where, inside = neighbours(
                pixel, row + 2, pixels, height, width, out_height, out_width, stride, padding, inputs, columns, HIGH
            )
            third += tl.dot(tl.trans(tl.load(x + where, mask=inside, other=0.0)), slopes)
    place = ((block * outputs + output[None, :]) * ROWS + row) * columns + column[:, None]
    known = (output < outputs)[None, :] & (column < columns)[:, None]
    tl.store(partial + place, first, mask=known)
    if ROWS > 1:
        tl.store(partial + place + columns, second, mask=known & (row + 1 < ROWS))
    if ROWS > 2:
        tl.store(partial + place + 2 * columns, third, mask=known & (row + 2 < ROWS))


@triton.jit(do_not_specialize=("size", "blocks"))
def merge(partial, result, size, blocks, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The sum over the blocks: partial (blocks, size) gives result (size,)."""
    own = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = own < size
    block = tl.arange(0, HIGH)
    there = (block < blocks)[:, None] & inside[None, :]
    total = tl.sum(tl.load(partial + block[:, None] * size + own[None, :], mask=there, other=0.0), 0)
    tl.store(result + own, total.to(result.dtype.element_ty), mask=inside)
