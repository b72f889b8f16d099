"""Convolutions of all members in one launch, for images stored channels last, as implicit matrix products.

Members differ in weights only: the images of member m are the m-th block of the batch, its weights the m-th block of
the stacked weights, and its number is an axis of the launch grid. A program computes tiles of HIGH pixels × WIDE
channels. Channels are counted in units of 8 (or 1), which lets the compiler load eight at a time; sizes are not
constants, so that one compiled kernel serves many layers. What may follow a convolution is in epilogue.py; kernels for
wide layers, and for gradients of layers with a stride, are in wide_convolution.py.
"""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.epilogue import epilogue_constants, finish_tile, store_statistics, to_tf32
from structured_ensembles.cuda.kernels.order import wait_for_earlier

SIZES = ("pixels", "height", "width", "padding", "inputs", "outputs", "tiles")
SWEEP_SIZES = ("images", "height", "out_height", "padding", "inputs", "outputs", "strips", "strip")


@triton.jit(do_not_specialize=SWEEP_SIZES)
def convolve_by_sweep(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    images, height, out_height, padding, inputs, outputs, strips, strip, eps,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    BACKWARD: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr, RELU: tl.constexpr,
    SHARED: tl.constexpr, TF32: tl.constexpr,
    IMAGES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Convolve as `convolve_by_rows` does, narrow layers with windows of 3 × 3 and stride 1: reads x once.

    A program goes down a strip of rows of IMAGES images side by side. A row of x, with its neighbours left and right
    (DEEP ≥ 3 × inputs columns for each pixel), is multiplied by all three rows of the window; what they give belongs to
    three rows of y, of which the uppermost is complete then. HIGH ≥ IMAGES × OUT_WIDTH, WIDE ≥ outputs.
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    place = tl.arange(0, HIGH)
    image = block // strips * IMAGES + place // OUT_WIDTH
    across = place % OUT_WIDTH
    top = block % strips * strip
    bottom = tl.minimum(top + strip, out_height)
    here = (image < images) & (place < IMAGES * OUT_WIDTH)
    output = tl.arange(0, WIDE)
    column = tl.arange(0, DEEP)
    known = output < outputs
    columns = 3 * inputs
    if not SHARED:
        x += (member * images * height * WIDTH).to(tl.int64) * inputs
    weight += member * (outputs * 9 * inputs)
    first = (member * images * out_height * OUT_WIDTH).to(tl.int64) * outputs
    y += first
    other += first
    norm_input += first
    norm_output += first
    used = (column < columns)[:, None] & known[None, :]
    if BACKWARD:
        weight_at = (column % inputs * 9 + 8 - column // inputs)[:, None] * outputs + output[None, :]
        weight_row = -3 * outputs
    else:
        weight_at = output[None, :] * (3 * columns) + column[:, None]
        weight_row = columns
    upper = tl.load(weight + weight_at, mask=used, other=0.0)
    middle = tl.load(weight + weight_at + weight_row, mask=used, other=0.0)
    lower = tl.load(weight + weight_at + 2 * weight_row, mask=used, other=0.0)
    if TF32:
        upper = to_tf32(upper)
        middle = to_tf32(middle)
        lower = to_tf32(lower)
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, eps, EPILOGUE, WIDE
    )
    in_row = ((across - padding) * inputs)[:, None] + column[None, :]
    inside = here[:, None] & (in_row >= 0) & (in_row < WIDTH * inputs) & (column < columns)[None, :]
    at = (image * height * (WIDTH * inputs))[:, None] + in_row
    at_output = ((image * out_height * OUT_WIDTH + across) * outputs)[:, None] + output[None, :]
    there = here[:, None] & known[None, :]
    pixels = tl.sum(here.to(tl.float32), 0)
    left = tl.zeros([HIGH, WIDE], tl.float32)
    right = tl.zeros([HIGH, WIDE], tl.float32)
    next_row = tl.zeros([HIGH, WIDE], tl.float32)
    this_row = tl.zeros([HIGH, WIDE], tl.float32)
    for row in tl.range(top - padding, bottom - padding + 2, num_stages=STAGES):
        values = tl.load(x + at + row * (WIDTH * inputs), mask=inside & (row >= 0) & (row < height), other=0.0)
        if SHARED and TF32:
            values = to_tf32(values)
        done = this_row + tl.dot(values, lower)
        this_row = next_row + tl.dot(values, middle)
        next_row = tl.dot(values, upper)
        down = row + padding - 2
        left, right = finish_tile(
            done, at_output + down * (OUT_WIDTH * outputs), there & (down >= top),
            y, other, norm_input, norm_output, mean, scale, factor, shift, left, right, ADD, EPILOGUE, MASK, RELU, TF32,
            LATE=DEEP > 128,  # as measured: where fewer columns are in registers, masking early takes less time
        )  # fmt: skip
    if EPILOGUE == 1 or EPILOGUE == 2:  # noqa: PLR1714 - Triton has no sets
        count = pixels * (bottom - top)
        sums = tl.sum(left, 0), tl.sum(right, 0)
        store_statistics(partial, block, member, output, outputs, sums, count, mean, known, EPILOGUE)


@triton.jit(do_not_specialize=SIZES)
def convolve_by_rows(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    pixels, height, width, padding, inputs, outputs, tiles, eps,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    BACKWARD: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
    RELU: tl.constexpr, SHARED: tl.constexpr, TF32: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Compute y[pixel, output] = Σ x[neighbour, input] · weight[output, row, tap, input] (+ other), then the epilogue.

    x: (members, images, height, width, inputs). y, other: (members, pixels, outputs), pixels = images × OUT_PIXELS.
    weight: (members, outputs, ROWS, TAPS, inputs). SHARED: x is (images, …), the same for all members.
    TF32: the type of the products of float32; what is not the output of such a kernel is rounded to it.
    BACKWARD: x is the gradient of a layer's outputs, y that of its inputs, and weight is the layer's, that is
    (members, inputs, ROWS, TAPS, outputs). With STRIDE 1 that is a convolution with the window turned around, and
    padding is that of the turned window, ROWS - 1 - padding of the layer. wide_convolution.py has other strides.
    A row of the window is read in one piece, DEEP ≥ TAPS × inputs adjacent numbers; ROWS ≤ 3.
    partial: (members, 3, blocks, outputs), the statistics of the epilogue. EPILOGUE 2: y becomes the gradient of the
    input of the ReLU after a batch norm with input norm_input and output norm_output (members, pixels, outputs); saved
    is (members, 2, outputs): mean and 1 / deviation. EPILOGUE 3: pivot and saved are a norm's running mean and
    variance, (members, outputs). RELU: applied at the end.
    """
    wait_for_earlier(DEPENDENT)
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    weight += member * (outputs * ROWS * TAPS * inputs)
    known = output < outputs
    column = tl.arange(0, DEEP)
    columns = TAPS * inputs
    used = (column < columns)[:, None] & known[None, :]
    if BACKWARD:
        tap = ROWS * TAPS - 1 - column // inputs
        weight_at = (column % inputs * (ROWS * TAPS) + tap)[:, None] * outputs + output[None, :]
        weight_row = -TAPS * outputs
    else:
        weight_at = output[None, :] * (ROWS * columns) + column[:, None]
        weight_row = columns
    first_row = tl.load(weight + weight_at, mask=used, other=0.0)
    if ROWS > 1:
        second_row = tl.load(weight + weight_at + weight_row, mask=used, other=0.0)
    if ROWS > 2:
        third_row = tl.load(weight + weight_at + 2 * weight_row, mask=used, other=0.0)
    if TF32:
        first_row = to_tf32(first_row)
        if ROWS > 1:
            second_row = to_tf32(second_row)
        if ROWS > 2:
            third_row = to_tf32(third_row)
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
    left = tl.zeros([HIGH, WIDE], tl.float32)
    right = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in range(tiles):
        pixel = (block * tiles + tile) * HIGH + tl.arange(0, HIGH)
        here = pixel < pixels
        image = pixel // OUT_PIXELS
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE - padding
        across = pixel % OUT_WIDTH * STRIDE - padding
        total = tl.zeros([HIGH, WIDE], tl.float32)
        in_row = (across * inputs)[:, None] + column[None, :]
        at = ((image * height + down) * (width * inputs))[:, None] + in_row
        in_row = (in_row >= 0) & (in_row < width * inputs) & (column < columns)[None, :]
        # All loads before the first product, so that they wait for memory together.
        inside = in_row & (here & (down >= 0) & (down < height))[:, None]
        first_values = tl.load(x + at, mask=inside, other=0.0)
        if ROWS > 1:
            inside = in_row & (here & (down >= -1) & (down < height - 1))[:, None]
            second_values = tl.load(x + at + width * inputs, mask=inside, other=0.0)
        if ROWS > 2:
            inside = in_row & (here & (down >= -2) & (down < height - 2))[:, None]
            third_values = tl.load(x + at + 2 * width * inputs, mask=inside, other=0.0)
        if SHARED and TF32:
            first_values = to_tf32(first_values)
            if ROWS > 1:
                second_values = to_tf32(second_values)
            if ROWS > 2:
                third_values = to_tf32(third_values)
        total += tl.dot(first_values, first_row)
        if ROWS > 1:
            total += tl.dot(second_values, second_row)
        if ROWS > 2:
            total += tl.dot(third_values, third_row)
        left, right = finish_tile(
            total, pixel[:, None] * outputs + output[None, :], here[:, None] & known[None, :],
            y, other, norm_input, norm_output, mean, scale, factor, shift, left, right, ADD, EPILOGUE, MASK, RELU, TF32,
        )  # fmt: skip
    if EPILOGUE == 1 or EPILOGUE == 2:  # noqa: PLR1714 - Triton has no sets
        count = tl.minimum(tl.maximum(pixels - block * tiles * HIGH, 0), tiles * HIGH).to(tl.float32)
        sums = tl.sum(left, 0), tl.sum(right, 0)
        store_statistics(partial, block, member, output, outputs, sums, count, mean, known, EPILOGUE)
