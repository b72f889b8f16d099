"""The shortcut of a residual network without parameters: every second pixel, and channels of zeros appended."""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.order import wait_for_earlier


@triton.jit(do_not_specialize=("images", "channels", "out_channels"))
def subsample(
    x, y, images, channels, out_channels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BACKWARD: tl.constexpr, UNIT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, OUT_PIXELS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Copy every STRIDE-th pixel of x (images, HEIGHT, WIDTH, channels) to y, and append channels of zeros.

    y: (images, OUT_PIXELS, out_channels). BACKWARD: x is the gradient of the inputs, which is written, y that of the
    outputs; its pixels that were left out get zeros.
    """
    wait_for_earlier(DEPENDENT)
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
