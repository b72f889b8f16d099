"""Convolutions of all members in one launch, for images stored channels last, as implicit matrix products.

Members differ in weights only: the images of member m are the m-th block of the batch, its weights the m-th block of
the stacked weights, and its number is an axis of the launch grid. A program computes tiles of HIGH pixels × WIDE
channels. Channels are counted in units of 8 (or 1), which lets the compiler load eight at a time; sizes are not
constants, so that one compiled kernel serves many layers.

What comes next to a convolution is computed while its outputs are still in registers (`EPILOGUE`): the moments that a
batch norm needs, or, on the way back, the sums that the gradient of a batch norm needs.
"""

import triton
import triton.language as tl

NOTHING, MOMENTS, NORM_SUMS = 0, 1, 2  # what an epilogue computes
UNMASKED, BY_INPUT, BY_OUTPUT = 0, 1, 2  # how the gradient of a ReLU is found: from the norm's input, or its output

SIZES = ("pixels", "height", "width", "padding", "inputs", "outputs", "tiles")


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
def finish_tile(
    total, at, there, y, other, norm_input, norm_output, mean, scale, factor, shift, left, right,
    ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Store a tile of outputs, total (pixels, outputs), and add its statistics to left and right, of the same shape.

    They are summed over pixels only once, by `store_statistics`: a sum over a tile makes all threads wait.
    EPILOGUE 1: deviations from `mean`, a guess of the mean of each output, and their squares. 2: the gradients of a
    batch norm's weight and bias.
    """
    if ADD:
        total += tl.load(other + at, mask=there, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        before = tl.load(norm_input + at, mask=there, other=0.0).to(tl.float32)
        if MASK == 1:
            after = (before - mean[None, :]) * factor[None, :] + shift[None, :]
            total = tl.where(after.to(y.dtype.element_ty) <= 0, 0.0, total)
        if MASK == 2:
            total = tl.where(tl.load(norm_output + at, mask=there, other=0.0) <= 0, 0.0, total)
    result = total.to(y.dtype.element_ty)
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
    partial, block, member, output, outputs, left, right, count, mean, known, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Sum up and store what a program has collected; partial: (members, 3, blocks, outputs).

    EPILOGUE 1: mean, squared deviations from it, and the number of pixels. 2: two sums.
    """
    first = tl.sum(left, 0)
    second = tl.sum(right, 0)
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
    pivot, saved, norm_weight, norm_bias, member, output, outputs, known, EPILOGUE: tl.constexpr, WIDE: tl.constexpr
):
    """Load what `finish_tile` needs for each output: mean (1: a guess), and of a norm 1 / deviation, factor, shift."""
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
    return mean, scale, factor, shift


SWEEP_SIZES = ("images", "height", "out_height", "padding", "inputs", "outputs", "strips", "strip")


@triton.jit(do_not_specialize=SWEEP_SIZES)
def convolve_by_sweep(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    images, height, out_height, padding, inputs, outputs, strips, strip,
    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    BACKWARD: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
    IMAGES: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `convolve`, for windows of 3 × 3 and stride 1, of narrow layers: each row of x is read once for three of y.

    A program goes down a strip of rows of IMAGES images side by side. A row of x, with its neighbours left and right
    (DEEP ≥ 3 × inputs columns for each pixel), is multiplied by all three rows of the window; what they give belongs to
    three rows of y, of which the uppermost is complete then. HIGH ≥ IMAGES × OUT_WIDTH, WIDE ≥ outputs.
    """
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
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, EPILOGUE, WIDE
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
        done = this_row + tl.dot(values, lower)
        this_row = next_row + tl.dot(values, middle)
        next_row = tl.dot(values, upper)
        down = row + padding - 2
        left, right = finish_tile(
            done, at_output + down * (OUT_WIDTH * outputs), there & (down >= top),
            y, other, norm_input, norm_output, mean, scale, factor, shift, left, right, ADD, EPILOGUE, MASK,
        )  # fmt: skip
    if EPILOGUE != 0:
        count = pixels * (bottom - top)
        store_statistics(partial, block, member, output, outputs, left, right, count, mean, known, EPILOGUE)


@triton.jit(do_not_specialize=SIZES)
def convolve(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    pixels, height, width, padding, inputs, outputs, tiles,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    BACKWARD: tl.constexpr, BY_ROWS: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """y[pixel, output] = Σ x[neighbour of the pixel, input] · weight[output, row, tap, input] (+ other), then epilogue.

    x: (members, images, height, width, inputs). y, other: (members, pixels, outputs), pixels = images × OUT_PIXELS.
    weight: (members, outputs, ROWS, TAPS, inputs).
    BACKWARD: x is the gradient of a layer's outputs, y that of its inputs, and weight is the layer's, that is
    (members, inputs, ROWS, TAPS, outputs). With STRIDE 1 that is a convolution with the window turned around, and
    padding is that of the turned window, ROWS - 1 - padding of the layer. Other strides: `convolve_back_strided`.
    BY_ROWS: a row of the window is read in one piece, TAPS × inputs adjacent numbers; ROWS ≤ 3.
    Otherwise tap by tap, DEEP inputs at a time.
    partial: (members, 3, blocks, outputs), what the epilogue leaves. NORM_SUMS: y becomes the gradient of a batch norm
    with input norm_input and output norm_output (members, pixels, outputs), behind its ReLU (see MASK); saved is
    (members, 2, outputs): mean and 1 / deviation.
    """
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    weight += member * (outputs * ROWS * TAPS * inputs)
    known = output < outputs
    column = tl.arange(0, DEEP)
    if BY_ROWS:
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
    else:
        chunks = (inputs + DEEP - 1) // DEEP
        if BACKWARD:
            weight_at = column[:, None] * (ROWS * TAPS * outputs) + output[None, :]
        else:
            weight_at = output[None, :] * (ROWS * TAPS * inputs) + column[:, None]
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, EPILOGUE, WIDE
    )
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
        if BY_ROWS:
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
            total += tl.dot(first_values, first_row)
            if ROWS > 1:
                total += tl.dot(second_values, second_row)
            if ROWS > 2:
                total += tl.dot(third_values, third_row)
        else:
            at = (((image * height + down) * width + across) * inputs)[:, None] + column[None, :]
            for number in range(ROWS * TAPS * chunks):  # one loop, which the compiler can pipeline
                step = number // chunks
                start = number % chunks * DEEP
                row = step // TAPS
                tap = step % TAPS
                inside = here & (down >= -row) & (down < height - row) & (across >= -tap) & (across < width - tap)
                in_chunk = column < inputs - start
                values = tl.load(
                    x + at + ((row * width + tap) * inputs + start), mask=inside[:, None] & in_chunk[None, :], other=0.0
                )
                if BACKWARD:
                    weight_here = weight_at + (start * (ROWS * TAPS) + ROWS * TAPS - 1 - step) * outputs
                else:
                    weight_here = weight_at + (step * inputs + start)
                used = in_chunk[:, None] & known[None, :]
                total += tl.dot(values, tl.load(weight + weight_here, mask=used, other=0.0))
        left, right = finish_tile(
            total, pixel[:, None] * outputs + output[None, :], here[:, None] & known[None, :],
            y, other, norm_input, norm_output, mean, scale, factor, shift, left, right, ADD, EPILOGUE, MASK,
        )  # fmt: skip
    if EPILOGUE != 0:
        count = tl.minimum(tl.maximum(pixels - block * tiles * HIGH, 0), tiles * HIGH).to(tl.float32)
        store_statistics(partial, block, member, output, outputs, left, right, count, mean, known, EPILOGUE)


@triton.jit(do_not_specialize=("images", "height", "width", "padding", "inputs", "outputs", "tiles"))
def convolve_back_strided(
    x, weight, y, partial, other, norm_input, norm_output, pivot, saved, norm_weight, norm_bias,
    images, height, width, padding, inputs, outputs, tiles,
    STRIDE: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, CELLS: tl.constexpr,
    CELLS_ACROSS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr,
    OUTPUT_UNIT: tl.constexpr, ADD: tl.constexpr, EPILOGUE: tl.constexpr, MASK: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs of a convolution with a stride, otherwise as `convolve` with BACKWARD.

    The pixels of y, OUT_HEIGHT × OUT_WIDTH in an image, are cut into cells of STRIDE × STRIDE, CELLS in an image. A
    program takes the pixels at one place in their cells, whose gradients all come by the same taps of the window.
    """
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    output = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    known = output < outputs
    column = tl.arange(0, DEEP)
    x += (member * images * height * width).to(tl.int64) * inputs
    weight += member * (outputs * ROWS * TAPS * inputs)
    first = (member * images * (OUT_HEIGHT * OUT_WIDTH)).to(tl.int64) * outputs
    y += first
    other += first
    norm_input += first
    norm_output += first
    mean, scale, factor, shift = epilogue_constants(
        pivot, saved, norm_weight, norm_bias, member, output, outputs, known, EPILOGUE, WIDE
    )
    below = block % (STRIDE * STRIDE) // STRIDE
    beside = block % STRIDE
    first_row = (below + padding) % STRIDE
    first_tap = (beside + padding) % STRIDE
    taps = (TAPS - first_tap + STRIDE - 1) // STRIDE
    rows = (ROWS - first_row + STRIDE - 1) // STRIDE
    chunks = (inputs + DEEP - 1) // DEEP
    left = tl.zeros([HIGH, WIDE], tl.float32)
    right = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in range(tiles):
        cell = (block // (STRIDE * STRIDE) * tiles + tile) * HIGH + tl.arange(0, HIGH)
        image = cell // CELLS
        down = cell % CELLS // CELLS_ACROSS * STRIDE + below
        across = cell % CELLS_ACROSS * STRIDE + beside
        here = (image < images) & (down < OUT_HEIGHT) & (across < OUT_WIDTH)
        total = tl.zeros([HIGH, WIDE], tl.float32)
        for number in range(rows * taps * chunks):
            start = number % chunks * DEEP
            row = first_row + number // chunks // taps * STRIDE
            tap = first_tap + number // chunks % taps * STRIDE
            from_down = (down + padding - row) // STRIDE
            from_across = (across + padding - tap) // STRIDE
            inside = here & (down + padding >= row) & (across + padding >= tap) & (from_down < height)
            inside = inside & (from_across < width)
            in_chunk = column < inputs - start
            at = ((image * height + from_down) * width + from_across) * inputs + start
            values = tl.load(x + at[:, None] + column[None, :], mask=inside[:, None] & in_chunk[None, :], other=0.0)
            weight_at = ((start + column) * (ROWS * TAPS) + row * TAPS + tap)[:, None] * outputs + output[None, :]
            weights = tl.load(weight + weight_at, mask=in_chunk[:, None] & known[None, :], other=0.0)
            total += tl.dot(values, weights)
        at_output = ((image * OUT_HEIGHT + down) * OUT_WIDTH + across)[:, None] * outputs + output[None, :]
        left, right = finish_tile(
            total, at_output, here[:, None] & known[None, :],
            y, other, norm_input, norm_output, mean, scale, factor, shift, left, right, ADD, EPILOGUE, MASK,
        )  # fmt: skip
    if EPILOGUE != 0:
        store_statistics(partial, block, member, output, outputs, left, right, 0.0, mean, known, EPILOGUE)


@triton.jit(do_not_specialize=SIZES)
def weight_products(
    x, dy, partial,
    pixels, height, width, padding, inputs, outputs, tiles,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """One block of pixels and all rows of a narrow layer: Σ x[neighbour of the pixel, input] · dy[pixel, output].

    x: (members, images, height, width, inputs); dy: (members, pixels, outputs); partial: (members, blocks, outputs,
    ROWS, TAPS, inputs). HIGH ≥ TAPS × inputs; ROWS ≤ 3.
    """
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
):  # fmt: skip
    """As `weight_products`, for windows of 3 × 3 and stride 1: each row of x is read once, see `convolve_by_sweep`.

    Here HIGH ≥ 3 × inputs columns and DEEP ≥ IMAGES × OUT_WIDTH pixels.
    """
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
def weight_products_by_tap(
    x, dy, partial,
    pixels, height, width, padding, inputs, outputs, tiles, input_tiles,
    STRIDE: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    ROWS: tl.constexpr, TAPS: tl.constexpr, INPUT_UNIT: tl.constexpr, OUTPUT_UNIT: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """As `weight_products` for wider layers: a program has one tap of the window, HIGH inputs and WIDE outputs.

    Launch grid: (blocks, members, ROWS × TAPS × input tiles × output tiles).
    """
    inputs *= INPUT_UNIT
    outputs *= OUTPUT_UNIT
    block = tl.program_id(0)
    member = tl.program_id(1)
    step = tl.program_id(2) % (ROWS * TAPS)
    rest = tl.program_id(2) // (ROWS * TAPS)
    channel = rest % input_tiles * HIGH + tl.arange(0, HIGH)
    output = rest // input_tiles * WIDE + tl.arange(0, WIDE)
    x += (member * (pixels // OUT_PIXELS) * height * width).to(tl.int64) * inputs
    dy += (member * pixels).to(tl.int64) * outputs
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for tile in range(tiles):
        pixel = (block * tiles + tile) * DEEP + tl.arange(0, DEEP)
        here = pixel < pixels
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE - padding + step // TAPS
        across = pixel % OUT_WIDTH * STRIDE - padding + step % TAPS
        inside = here & (down >= 0) & (down < height) & (across >= 0) & (across < width)
        values = tl.load(
            x + (((pixel // OUT_PIXELS * height + down) * width + across) * inputs)[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < inputs)[None, :], other=0.0,
        )  # fmt: skip
        gradients = tl.load(
            dy + pixel[:, None] * outputs + output[None, :],
            mask=here[:, None] & (output < outputs)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(tl.trans(values), gradients)
    partial += (member * tl.num_programs(0) + block).to(tl.int64) * (outputs * ROWS * TAPS * inputs)
    place = (output[None, :] * (ROWS * TAPS) + step) * inputs + channel[:, None]
    tl.store(partial + place, total, mask=(output < outputs)[None, :] & (channel < inputs)[:, None])


@triton.jit(do_not_specialize=("size", "blocks"))
def merge_blocks(partial, result, size, blocks, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Sum over blocks: partial (members, blocks, size) gives result (members, size)."""
    member = tl.program_id(1)
    place = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = place < size
    total = tl.zeros([WIDE], tl.float32)
    for start in range(0, blocks, HIGH):
        block = start + tl.arange(0, HIGH)
        there = (block < blocks)[:, None] & inside[None, :]
        values = tl.load(
            partial + (member * blocks + block).to(tl.int64)[:, None] * size + place[None, :], mask=there, other=0.0
        )
        total += tl.sum(values, 0)
    tl.store(result + member * size + place, total.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("images", "channels", "out_channels"))
def subsample(
    x, y, images, channels, out_channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BACKWARD: tl.constexpr, UNIT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every STRIDE-th pixel of x (images, HEIGHT, WIDTH, channels), with channels of zeros appended.

    y: (images, OUT_PIXELS, out_channels). BACKWARD: x is the gradient of the inputs, which is written, y that of the
    outputs; its pixels that were left out get zeros.
    """
    channels *= UNIT
    out_channels *= UNIT
    channel = tl.arange(0, WIDE)
    pixel = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    if BACKWARD:
        image = pixel // (HEIGHT * WIDTH)
        down = pixel // WIDTH % HEIGHT
        across = pixel % WIDTH
        inside = (image < images)[:, None] & (channel < channels)[None, :]
        kept = (down % STRIDE == 0) & (across % STRIDE == 0)
        at = (image * OUT_PIXELS + down // STRIDE * OUT_WIDTH + across // STRIDE).to(tl.int64) * out_channels
        values = tl.load(y + at[:, None] + channel[None, :], mask=inside & kept[:, None], other=0.0)
        tl.store(x + pixel.to(tl.int64)[:, None] * channels + channel[None, :], values, mask=inside)
    else:
        image = pixel // OUT_PIXELS
        down = pixel % OUT_PIXELS // OUT_WIDTH * STRIDE
        across = pixel % OUT_WIDTH * STRIDE
        inside = (image < images)[:, None]
        at = ((image * HEIGHT + down) * WIDTH + across).to(tl.int64) * channels
        values = tl.load(x + at[:, None] + channel[None, :], mask=inside & (channel < channels)[None, :], other=0.0)
        there = inside & (channel < out_channels)[None, :]
        tl.store(y + pixel.to(tl.int64)[:, None] * out_channels + channel[None, :], values, mask=there)
