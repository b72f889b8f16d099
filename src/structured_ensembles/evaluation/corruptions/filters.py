"""Image filters of the blur and weather corruptions, for whole batches: smoothing, streaks, zoom, fractal noise."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions.randomness import Draws

Border = Literal["edge", "mirror", "symmetric"]  # aaa|abc, cb|abc, ba|abc
NEGLIGIBLE = 1e-6  # weights of a streak below this share of the largest are left out


def length_scale(images: Tensor) -> float:
    """Compute the factor for lengths that are given for 32×32 pixels.

    Less than in proportion, like the published severities, whose blurs grow 1.5 and 4 times from 32 to 64 and 224.
    Below 32 still less, because nothing blurs by less than half a pixel.
    """
    size = min(images.shape[-2:])
    return float((size / 32) ** (2 / 3 if size > 32 else 1 / 3))


def gaussian_blur(
    images: Tensor, sigma: float, border: Border = "edge", radius: int | None = None, truncate: float = 4.0
) -> Tensor:
    """Smooth images (…, height, width) with a Gaussian of deviation `sigma` pixels.

    border: how images go on beyond their edge. radius: of the kernel; by default `truncate` deviations, rounded.
    """
    weights = _gaussian_weights(sigma, int(truncate * sigma + 0.5) if radius is None else radius)
    for axis in (-2, -1):
        images = _filter_axis(images, weights, axis, border)
    return images


def smooth_noise(noise: Tensor, sigma: float, scale: float, border: Border = "edge", truncate: float = 4.0) -> Tensor:
    """Smooth noise (…, height, width) over scale * sigma pixels, keeping the strength of noise smoothed over sigma.

    Bumps grow with the image and keep their height.
    """
    before, after = (_gaussian_weights(width, int(truncate * width + 0.5)) for width in (sigma, scale * sigma))
    strength = sum(weight**2 for weight in before) / sum(weight**2 for weight in after)
    return strength * gaussian_blur(noise, scale * sigma, border, truncate=truncate)


def convolve(images: Tensor, kernel: Tensor) -> Tensor:
    """Correlate images (batch, channels, height, width) with a small kernel of odd sides, by adding shifted images."""
    rows, columns = kernel.shape
    height, width = images.shape[-2:]
    padded = pad(images, rows // 2, columns // 2, "mirror")
    result = torch.zeros_like(images)
    for row, column in kernel.nonzero().tolist():
        result.add_(padded[..., row : row + height, column : column + width], alpha=float(kernel[row, column]))
    return result


def streak(images: Tensor, degrees: Tensor, sigma: float, radius: float) -> Tensor:
    """Blur by motion: average along a line from every pixel, with the weights of half a Gaussian.

    images: (batch, channels, height, width). degrees: the direction of each image, (batch,). The line has
    2·⌈radius⌉ + 1 pixels: ImageMagick, which the published images come from, takes that width for one side.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[None, :, None]
    columns = torch.arange(width, device=images.device)[None, None, :]
    angle = torch.deg2rad(degrees)[:, None, None]
    weights = [math.exp(-(step**2) / (2 * sigma**2)) for step in range(2 * math.ceil(radius) + 1)]
    weights = [weight / sum(weights) for weight in weights if weight > NEGLIGIBLE]
    flat, result = images.flatten(2), torch.zeros_like(images).flatten(2)
    for step, weight in enumerate(weights):
        down, right = ((step * along - 0.5).ceil().long() for along in (angle.sin(), angle.cos()))
        source = (rows + down).clamp(0, height - 1) * width + (columns + right).clamp(0, width - 1)
        index = source.flatten(1)[:, None].expand_as(flat)
        result.add_(flat.gather(2, index), alpha=weight)
    return result.view_as(images)


def magnify(images: Tensor, *factors: float) -> Tensor:
    """Zoom into images (…, height, width) by each factor, with linear interpolation, and add the results up.

    As the published generator does: it crops whole pixels, stretches the crop to a whole number of pixels from its
    first to its last, and cuts that to size. So the middle is up to half a pixel off, and the magnification not exactly
    the factor. Sums of two products, not a product of matrices: the same for any batch.
    """
    height, width = images.shape[-2:]
    planes = images.reshape(-1, height, width).permute(1, 2, 0).contiguous()  # images last: whole rows are copied
    total = torch.zeros_like(planes)
    for factor in factors:
        zoomed = planes
        for axis in (0, 1):
            left, share = (tensor.to(images.device) for tensor in _zoom_sources(images.shape[axis - 2], factor))
            share = share.to(images.dtype).view(-1, *[1] * (2 - axis))
            zoomed = torch.lerp(zoomed.index_select(axis, left), zoomed.index_select(axis, left + 1), share)
        total += zoomed
    return total.permute(2, 0, 1).reshape(images.shape)


def fractal_noise(draws: Draws, stream: str, size: tuple[int, int], decay: float) -> Tensor:
    """Draw fractal noise (batch, height, width) in [0,1] by midpoint displacement on a torus (diamond-square).

    decay: how many times smaller the displacement is each time the grid is refined; large values make soft clouds.
    """
    side = 1 << max(1, math.ceil(math.log2(max(size))))
    noise = draws.uniform(stream, (side, side), -1.0, 1.0)
    field = torch.zeros_like(noise)
    step, amplitude = side, 1.0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        middle = corners + corners.roll(-1, 1)
        middle = (middle + middle.roll(-1, 2)) / 4
        centres = middle + amplitude * noise[:, half::step, half::step]
        field[:, half::step, half::step] = centres
        across = (centres + centres.roll(1, 1) + corners + corners.roll(-1, 2)) / 4
        along = (centres + centres.roll(1, 2) + corners + corners.roll(-1, 1)) / 4
        field[:, ::step, half::step] = across + amplitude * noise[:, ::step, half::step]
        field[:, half::step, ::step] = along + amplitude * noise[:, half::step, ::step]
        step, amplitude = half, amplitude / decay
    return rescale(field)[:, : size[0], : size[1]]


def rescale(fields: Tensor) -> Tensor:
    """Rescale every field (batch, height, width) to reach from 0 to 1."""
    low, high = fields.amin((1, 2), keepdim=True), fields.amax((1, 2), keepdim=True)
    return (fields - low) / (high - low).clamp_min(1e-6)


def pad(images: Tensor, rows: int, columns: int, border: Border) -> Tensor:
    """Pad images (…, height, width) by this many rows and columns on each side."""
    for axis, width in ((-2, rows), (-1, columns)):
        if width:
            images = images.index_select(axis, _padding_sources(images.shape[axis], width, border).to(images.device))
    return images


def quantize(images: Tensor, *, rounded: bool = False) -> Tensor:
    """Quantize pixels in [0,1] to 256 levels, downwards as a cast to uint8 does, or to the nearest.

    The tolerance of a ten-thousandth of a level absorbs float32 rounding errors.
    """
    return (255 * images + (0.5001 if rounded else 0.0001)).floor() / 255


def _gaussian_weights(sigma: float, radius: int) -> list[float]:
    """Compute a Gaussian's weights of the pixels within `radius`; their sum is 1."""
    weights = [math.exp(-(offset**2) / (2 * sigma**2)) for offset in range(-radius, radius + 1)]
    return [weight / sum(weights) for weight in weights]


def _filter_axis(images: Tensor, weights: list[float], axis: int, border: Border) -> Tensor:
    radius, size = len(weights) // 2, images.shape[axis]
    padded = pad(images, *((radius, 0) if axis == -2 else (0, radius)), border)
    result = padded.narrow(axis, 0, size) * weights[0]
    for offset, weight in enumerate(weights[1:], 1):
        result.add_(padded.narrow(axis, offset, size), alpha=weight)
    return result


def _padding_sources(size: int, reach: int, border: Border) -> Tensor:
    """Compute the index of the pixel shown at each position from -reach to size - 1 + reach of a line of `size`."""
    positions = torch.arange(-reach, size + reach)
    if border == "edge":
        return positions.clamp(0, size - 1)
    period = 2 * size - (2 if border == "mirror" else 0)  # mirrored at the middle of the last pixel, or at its rim
    positions = positions.remainder(period)
    return torch.where(positions < size, positions, period - positions - (0 if border == "mirror" else 1))


def _zoom_sources(size: int, factor: float) -> tuple[Tensor, Tensor]:
    """Locate the sources of a magnified line: the pixel left of each, int64 (size,), and the weight of the next."""
    crop = math.ceil(size / factor)
    stretched_size = round(crop * factor)
    first = torch.arange(size, dtype=torch.float64) + (stretched_size - size) // 2
    positions = first * (crop - 1) / max(1, stretched_size - 1)
    left = positions.floor().clamp(0, max(0, crop - 2)).long()
    return left + (size - crop) // 2, positions - left
