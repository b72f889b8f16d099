"""Gradients of the weights of convolutions, of all members in one launch: products of blocks of pixels, then their sum.

Layout and units are those of convolution.py.
"""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.convolution import SIZES, SWEEP_SIZES
from structured_ensembles.cuda.kernels.order import wait_for_earlier


@triton.jit(do_not_specialize=SIZES)
def weight_products_by_rows(
    x, dy, partial,
    pixels, height, width, padding, inputs, outputs, tiles,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sum x[neighbour of the pixel, input] · dy[pixel, output] over one block of pixels, all rows of a narrow layer.

    x: (members, images, height, width, inputs); dy: (members, pixels, outputs); partial: (members, blocks, outputs,
    ROWS, TAPS, inputs). HIGH ≥ TAPS × inputs; ROWS ≤ 3.
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    columns = TAPS * inputs
    block = tl.program_id(0)
    member = tl.program_id(1)
    x += (member * (pixels // OUT_PIXELS) * height * width).to(tl.int64) * inputs
    dy += (member * pixels).to(tl.int64) * outputs
    column = tl.arange(0, HIGH)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    first = tl.zeros([HIGH, WIDE], tl.float32)
    second = tl.zeros([HIGH, WIDE], tl.float32)
    third = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in range(tiles):
        pixel = (block * tiles + tile) * DEEP + tl.arange(0, DEEP)
        here = pixel < pixels
        gradients = tl.load(
            dy + pixel[:, None] * outputs + output[None, :],
            mask=here[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE - padding
        across = (pixel % OUT_WIDTH * STRIDE - padding) * inputs
        at = ((pixel // OUT_PIXELS * height + down) * (width * inputs) + across)[:, None] + column[None, :]
        in_row = across[:, None] + column[None, :]
        in_row = (in_row >= 0) & (in_row < width * inputs) & (column < columns)[None, :]
        inside = in_row & (here & (down >= 0) & (down < height))[:, None]
        first += tl.dot(tl.trans(tl.load(x + at, mask=inside, other=0.0)), gradients)
        if ROWS > 1:
            inside = in_row & (here & (down >= -1) & (down < height - 1))[:, None]
            second += tl.dot(tl.trans(tl.load(x + at + width * inputs, mask=inside, other=0.0)), gradients)
        if ROWS > 2:
            inside = in_row & (here & (down >= -2) & (down < height - 2))[:, None]
            third += tl.dot(tl.trans(tl.load(x + at + 2 * width * inputs, mask=inside, other=0.0)), gradients)
    size = outputs * ROWS * columns
    partial += (member * tl.num_programs(0) + block).to(tl.int64) * size
    place = output[None, :] * (ROWS * columns) + column[:, None]
    known = (output < outputs)[None, :] & (column < columns)[:, None]
    tl.store(partial + place, first, mask=known)
    if ROWS > 1:
        tl.store(partial + place + columns, second, mask=known)
    if ROWS > 2:
        tl.store(partial + place + 2 * columns, third, mask=known)


@triton.jit(do_not_specialize=SWEEP_SIZES)
def weight_products_by_sweep(
    x, dy, partial,
    images, height, out_height, padding, inputs, outputs, strips, strip,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    IMAGES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sum as `weight_products_by_rows` does, windows of 3 × 3 with stride 1: by strips of rows, as `convolve_by_sweep`.

    Here HIGH ≥ 3 × inputs columns and DEEP ≥ IMAGES × OUT_WIDTH pixels.
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    columns = 3 * inputs
    block = tl.program_id(0)
    member = tl.program_id(1)
    place = tl.arange(0, DEEP)
    image = block // strips * IMAGES + place // OUT_WIDTH
    across = place % OUT_WIDTH
    top = block % strips * strip
    bottom = tl.minimum(top + strip, height)
    here = (image < images) & (place < IMAGES * OUT_WIDTH)
    column = tl.arange(0, HIGH)
    output = tl.arange(0, WIDE)
    x += (member * images * height * WIDTH).to(tl.int64) * inputs
    dy += (member * images * out_height * OUT_WIDTH).to(tl.int64) * outputs
    in_row = ((across - padding) * inputs)[:, None] + column[None, :]
    inside = here[:, None] & (in_row >= 0) & (in_row < WIDTH * inputs) & (column < columns)[None, :]
    at = (image * height * (WIDTH * inputs))[:, None] + in_row
    known = here[:, None] & (output < outputs)[None, :]
    at_output = ((image * out_height * OUT_WIDTH + across) * outputs)[:, None] + output[None, :]
    upper = tl.zeros([HIGH, WIDE], tl.float32)
    middle = tl.zeros([HIGH, WIDE], tl.float32)
    lower = tl.zeros([HIGH, WIDE], tl.float32)
    step = OUT_WIDTH * outputs
    for row in tl.range(top, bottom, num_stages=STAGES):
        values = tl.trans(tl.load(x + at + row * (WIDTH * inputs), mask=inside, other=0.0))
        down = row + padding
        below = tl.load(dy + at_output + down * step, mask=known & (down < out_height), other=0.0)
        upper += tl.dot(values, below)
        beside = tl.load(
            dy + at_output + (down - 1) * step, mask=known & (down >= 1) & (down - 1 < out_height), other=0.0
        )
        middle += tl.dot(values, beside)
        above = tl.load(
            dy + at_output + (down - 2) * step, mask=known & (down >= 2) & (down - 2 < out_height), other=0.0
        )
        lower += tl.dot(values, above)
    partial += (member * tl.num_programs(0) + block).to(tl.int64) * (outputs * 3 * columns)
    place_of = output[None, :] * (3 * columns) + column[:, None]
    there = (output < outputs)[None, :] & (column < columns)[:, None]
    tl.store(partial + place_of, upper, mask=there)
    tl.store(partial + place_of + columns, middle, mask=there)
    tl.store(partial + place_of + 2 * columns, lower, mask=there)


@triton.jit(do_not_specialize=(*SIZES, "input_tiles"))
def weight_products_by_taps(
    x, dy, partial,
    pixels, height, width, padding, inputs, outputs, tiles, input_tiles,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    WHOLE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sum as `weight_products_by_rows` does, for wider layers: up to 3 neighbouring taps, HIGH inputs, WIDE outputs.

    WHOLE: inputs and outputs are multiples of HIGH and WIDE.
    Launch grid: (blocks, members, ROWS × ⌈TAPS / 3⌉ × input tiles × output tiles).
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    row = tl.program_id(2) % ROWS
    tap = tl.program_id(2) // ROWS % ((TAPS + 2) // 3) * 3
    rest = tl.program_id(2) // (ROWS * ((TAPS + 2) // 3))
    channel = rest % input_tiles * HIGH + tl.arange(0, HIGH)
    output = rest // input_tiles * WIDE + tl.arange(0, WIDE)
    known_inputs = (channel < inputs)[None, :]
    known_outputs = (output < outputs)[None, :]
    x += (member * (pixels // OUT_PIXELS) * height * width).to(tl.int64) * inputs
    dy += (member * pixels).to(tl.int64) * outputs
    first = tl.zeros([HIGH, WIDE], tl.float32)
    second = tl.zeros([HIGH, WIDE], tl.float32)
    third = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in range(tiles):
        pixel = (block * tiles + tile) * DEEP + tl.arange(0, DEEP)
        here = pixel < pixels
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE - padding + row
        across = pixel % OUT_WIDTH * STRIDE - padding + tap
        in_row = here & (down >= 0) & (down < height)
        x_at = x + (((pixel // OUT_PIXELS * height + down) * width + across) * inputs)[:, None] + channel[None, :]
        dy_at = dy + pixel[:, None] * outputs + output[None, :]
        inside = (in_row & (across >= 0) & (across < width))[:, None]
        inside_next = (in_row & (across >= -1) & (across < width - 1))[:, None]
        inside_last = (in_row & (across >= -2) & (across < width - 2))[:, None]
        there = here[:, None]
        if not WHOLE:
            inside = inside & known_inputs
            inside_next = inside_next & known_inputs
            inside_last = inside_last & known_inputs
            there = there & known_outputs
        gradients = tl.load(dy_at, mask=there, other=0.0)
        first += tl.dot(tl.trans(tl.load(x_at, mask=inside, other=0.0)), gradients)
        if TAPS > 1:
            second += tl.dot(tl.trans(tl.load(x_at + inputs, mask=inside_next, other=0.0)), gradients)
        if TAPS > 2:
            third += tl.dot(tl.trans(tl.load(x_at + 2 * inputs, mask=inside_last, other=0.0)), gradients)
    partial += (member * tl.num_programs(0) + block).to(tl.int64) * (outputs * ROWS * TAPS * inputs)
    place = (output[None, :] * (ROWS * TAPS) + row * TAPS + tap) * inputs + channel[:, None]
    known = known_outputs & (channel < inputs)[:, None]
    tl.store(partial + place, first, mask=known)
    if TAPS > 1:
        tl.store(partial + place + inputs, second, mask=known & (tap + 1 < TAPS))
    if TAPS > 2:
        tl.store(partial + place + 2 * inputs, third, mask=known & (tap + 2 < TAPS))


@triton.jit(do_not_specialize=("size", "blocks"))
def merge_blocks(
    partial, result, size, blocks, UNIT: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Sum over blocks: partial (members, blocks, size) gives result (members, size). size: in units, as channels."""
    wait_for_earlier(DEPENDENT)
    size *= UNIT
    member = tl.program_id(1)
    place = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = place < size
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, blocks, HIGH):
        block = start + tl.arange(0, HIGH)
        there = (block < blocks)[:, None] & inside[None, :]
        total += tl.load(
            partial + (member * blocks + block).to(tl.int64)[:, None] * size + place[None, :], mask=there, other=0.0
        )
    # Only one sum over the tile, since it makes all threads wait.
    tl.store(result + member * size + place, tl.sum(total, 0).to(result.dtype.element_ty), mask=inside)
