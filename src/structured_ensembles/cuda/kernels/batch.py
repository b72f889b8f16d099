"""The batches of several members in one kernel: look up, crop, flip, normalise.

The pixels of an image, channels × height × width of them, are one row; a block of pixels of one image is a program.
"""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.order import wait_for_earlier


@triton.jit(do_not_specialize=("size", "samples", "channels", "height", "width", "padding"))
def draw_images(
    images, labels, order, crops, starts, step, mean, deviation, out, out_labels,
    size, samples, channels, height, width, padding,
    CROPS: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write `out` (members × size, channels, height, width) and `out_labels` (members × size,) of batch number `step`.

    images: uint8 (stored, channels, height, width). order: (members, samples), which of them in the order of each
    member's epoch; crops: (members, samples, 3), how far down and right each is cropped, and whether it is flipped.
    starts: of each batch in that order. CHANNELS_LAST: how `out` lies in memory.
    """
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    place = row // size * samples + tl.load(starts + tl.load(step)) + row % size
    sample = tl.load(order + place)
    pixels = channels * height * width
    pixel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < pixels
    channel = pixel // (height * width)
    y = pixel // width % height
    x = pixel % width
    known = inside
    target = pixel
    if CHANNELS_LAST:
        target = pixel % (height * width) * channels + channel
    if CROPS:
        flipped = tl.load(crops + 3 * place + 2) == 1
        x = tl.where(flipped, width - 1 - x, x) + tl.load(crops + 3 * place + 1).to(tl.int32) - padding
        y += tl.load(crops + 3 * place).to(tl.int32) - padding
        known = inside & (x >= 0) & (x < width) & (y >= 0) & (y < height)  # what is beyond the image is black
    value = tl.load(images + sample * pixels + (channel * height + y) * width + x, mask=known, other=0).to(tl.float32)
    value = value / 255
    value = (value - tl.load(mean + channel, mask=inside, other=0.0)) / tl.load(
        deviation + channel, mask=inside, other=1.0
    )
    tl.store(out + row * pixels + target, value, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_labels + row, tl.load(labels + sample))
