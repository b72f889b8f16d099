"""Convolutions of wide layers, all members in one launch, as implicit matrix products: window by window, tap by tap.

Layout, units and epilogues are those of convolution.py. A program computes tiles of HIGH pixels × WIDE outputs, from
DEEP inputs at one tap of the window at a time: one loop without branches, which the compiler can pipeline.
"""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.convolution import SIZES
from structured_ensembles.cuda.kernels.epilogue import epilogue_constants, finish_tile, store_statistics, to_tf32
from structured_ensembles.cuda.kernels.order import wait_for_earlier

BACK_SIZES = ("images", "height", "width", "padding", "inputs", "outputs", "tiles")


@triton.jit
def bits_inside(first, size, COUNT: tl.constexpr):
    """Return a bit for each of the COUNT ≤ 32 places from `first` on: whether it is within 0 … size - 1."""
    bits = first * 0
    for offset in tl.static_range(COUNT):
        bits |= ((first >= -offset) & (first < size - offset)).to(tl.int32) << offset
    return bits


@triton.jit(do_not_specialize=SIZES)
def convolve_by_taps(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    pixels, height, width, padding, inputs, outputs, tiles, eps,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    BACKWARD: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, TF32: tl.constexpr, WHOLE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute what `convolve_by_rows` does, for layers of any width and windows of up to 32 × 32.

    WHOLE: inputs and outputs are multiples of DEEP and WIDE, so that no tile is cut off by them.
    Launch grid: (blocks of `tiles` tiles of pixels, members, tiles of outputs).
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    known = output < outputs
    column = tl.arange(0, DEEP)
    weight += member * (outputs * ROWS * TAPS * inputs)
    if BACKWARD:
        weight_at = weight + (column[:, None] * (ROWS * TAPS * outputs) + output[None, :])
    else:
        weight_at = weight + (output[None, :] * (ROWS * TAPS * inputs) + column[:, None])
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, eps, EPILOGUE, WIDE
    )
    if not SHARED:
        x += (member * (pixels // OUT_PIXELS) * height * width).to(tl.int64) * inputs
    first = (member * pixels).to(tl.int64) * outputs
    y += first
    other += first
    norm_input += first
    norm_output += first
    left = tl.zeros([WIDE], tl.float32)
    right = tl.zeros([WIDE], tl.float32)
    steps = (inputs + DEEP - 1) // DEEP * (ROWS * TAPS)
    for tile in range(tiles):
        pixel = (block * tiles + tile) * HIGH + tl.arange(0, HIGH)
        here = pixel < pixels
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE - padding
        across = pixel % OUT_WIDTH * STRIDE - padding
        x_at = x + (((pixel // OUT_PIXELS * height + down) * width + across) * inputs)[:, None] + column[None, :]
        rows_inside = tl.where(here, bits_inside(down, height, ROWS), 0)
        taps_inside = bits_inside(across, width, TAPS)
        total = tl.zeros([HIGH, WIDE], tl.float32)
        for number in range(steps):
            step = number % (ROWS * TAPS)
            start = number // (ROWS * TAPS) * DEEP
            row = step // TAPS
            tap = step % TAPS
            inside = ((rows_inside >> row) & (taps_inside >> tap) & 1) != 0
            if BACKWARD:
                weight_here = (start * (ROWS * TAPS) + ROWS * TAPS - 1 - step) * outputs
            else:
                weight_here = step * inputs + start
            if WHOLE:
                values = tl.load(x_at + ((row * width + tap) * inputs + start), mask=inside[:, None], other=0.0)
                weights = tl.load(weight_at + weight_here)
            else:
                in_chunk = column < inputs - start
                values = tl.load(
                    x_at + ((row * width + tap) * inputs + start), mask=inside[:, None] & in_chunk[None, :], other=0.0
                )
                weights = tl.load(weight_at + weight_here, mask=in_chunk[:, None] & known[None, :], other=0.0)
            if TF32:
                weights = to_tf32(weights)
            if SHARED and TF32:
                values = to_tf32(values)
            total += tl.dot(values, weights)
        nothing = tl.zeros([HIGH, WIDE], tl.float32)
        tile_left, tile_right = finish_tile(
            total, pixel[:, None] * outputs + output[None, :], here[:, None] & known[None, :],
            y, other, norm_input, norm_output, mean, scale, factor, shift, nothing, nothing,
            ADD, EPILOGUE, MASK, RELU, TF32,
        )  # fmt: skip
        if EPILOGUE == 1 or EPILOGUE == 2:  # noqa: PLR1714 - Triton has no sets
            left += tl.sum(tile_left, 0)
            right += tl.sum(tile_right, 0)
    if EPILOGUE == 1 or EPILOGUE == 2:  # noqa: PLR1714
        count = tl.minimum(tl.maximum(pixels - block * tiles * HIGH, 0), tiles * HIGH).to(tl.float32)
        store_statistics(partial, block, member, output, outputs, (left, right), count, mean, known, EPILOGUE)


@triton.jit(do_not_specialize=BACK_SIZES)
def convolve_back_strided(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    images, height, width, padding, inputs, outputs, tiles,
    STRIDE: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, CELLS: tl.constexpr,
    CELLS_ACROSS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr,
    OUTPUT_UNIT: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute the gradient of the inputs of a convolution with a stride, otherwise as `convolve_by_taps` with BACKWARD.

    The pixels of y, OUT_HEIGHT × OUT_WIDTH in an image, are cut into cells of STRIDE × STRIDE, CELLS in an image. The
    gradients of pixels at one place in their cells come by the same taps of the window, every STRIDE-th from
    `first_row` and `first_tap` on. A program takes all places of its cells in turn, so that all have as much to do.
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    known = output < outputs
    column = tl.arange(0, DEEP)
    x += (member * images * height * width).to(tl.int64) * inputs
    weight += member * (outputs * ROWS * TAPS * inputs)
    weight_at = weight + (column[:, None] * (ROWS * TAPS * outputs) + output[None, :])
    first = (member * images * (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64) * outputs
    y += first
    other += first
    norm_input += first
    norm_output += first
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, 0.0, EPILOGUE, WIDE
    )
    chunks = (inputs + DEEP - 1) // DEEP
    left = tl.zeros([WIDE], tl.float32)
    right = tl.zeros([WIDE], tl.float32)
    for turn in range(tiles * STRIDE * STRIDE):
        below = turn % (STRIDE * STRIDE) // STRIDE
        beside = turn % STRIDE
        first_row = (below + padding) % STRIDE
        first_tap = (beside + padding) % STRIDE
        taps = (TAPS - first_tap + STRIDE - 1) // STRIDE
        steps = (ROWS - first_row + STRIDE - 1) // STRIDE * taps
        cell = (block * tiles + turn // (STRIDE * STRIDE)) * HIGH + tl.arange(0, HIGH)
        image = cell // CELLS
        cell_down = cell % CELLS // CELLS_ACROSS
        cell_across = cell % CELLS_ACROSS
        down = cell_down * STRIDE + below
        across = cell_across * STRIDE + beside
        here = (image < images) & (down < OUT_HEIGHT) & (across < OUT_WIDTH)
        # The pixel of x at the first of these taps; those at the others are above and to the left of it.
        from_down = cell_down + (below + padding) // STRIDE
        from_across = cell_across + (beside + padding) // STRIDE
        x_at = x + (((image * height + from_down) * width + from_across) * inputs)[:, None] + column[None, :]
        rows_inside = tl.where(here, bits_inside(height - 1 - from_down, height, (ROWS + STRIDE - 1) // STRIDE), 0)
        taps_inside = bits_inside(width - 1 - from_across, width, (TAPS + STRIDE - 1) // STRIDE)
        total = tl.zeros([HIGH, WIDE], tl.float32)
        for number in range(steps * chunks):
            step = number % steps
            start = number // steps * DEEP
            row = step // taps
            tap = step % taps
            inside = ((rows_inside >> row) & (taps_inside >> tap) & 1) != 0
            x_here = start - (row * width + tap) * inputs
            window_place = (first_row + row * STRIDE) * TAPS + first_tap + tap * STRIDE
            weight_here = (start * (ROWS * TAPS) + window_place) * outputs
            if WHOLE:
                values = tl.load(x_at + x_here, mask=inside[:, None], other=0.0)
                weights = tl.load(weight_at + weight_here)
            else:
                in_chunk = column < inputs - start
                values = tl.load(x_at + x_here, mask=inside[:, None] & in_chunk[None, :], other=0.0)
                weights = tl.load(weight_at + weight_here, mask=in_chunk[:, None] & known[None, :], other=0.0)
            total += tl.dot(values, weights)
        nothing = tl.zeros([HIGH, WIDE], tl.float32)
        tile_left, tile_right = finish_tile(
            total, ((image * OUT_HEIGHT + down) * OUT_WIDTH + across)[:, None] * outputs + output[None, :],
            here[:, None] & known[None, :],
            y, other, norm_input, norm_output, mean, scale, factor, shift, nothing, nothing, ADD, EPILOGUE, MASK,
        )  # fmt: skip
        if EPILOGUE != 0:
            left += tl.sum(tile_left, 0)
            right += tl.sum(tile_right, 0)
    if EPILOGUE != 0:
        store_statistics(partial, block, member, output, outputs, (left, right), 0.0, mean, known, EPILOGUE)
