"""JPEG compression and back: YCbCr, chroma subsampling, 8×8 cosine transform, quantisation; no entropy coding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from structured_ensembles.evaluation.corruptions.randomness import Draws

# The example tables of the standard (ITU T.81, annex K), which libjpeg scales by the quality.
LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61),
    *(12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77),
    *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101),
    *(72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    *(17, 18, 24, 47, 99, 99, 99, 99),
    *(18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *(99,) * 32,
)
TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168735892, -0.331264108, 0.5), (0.5, -0.418687589, -0.081312411))
TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136286, -0.714136286), (1.0, 1.772, 0.0))


def jpeg_compression(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Compress images as JPEG, at the qualities published for CIFAR-10-C."""
    return jpeg(images, (80, 65, 58, 50, 40)[severity - 1])


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Compress and decompress images (batch, channels, height, width) in [0,1] at a JPEG quality from 1 to 100."""
    pixels = (255 * images).round()
    height, width = images.shape[-2:]
    if images.shape[1] != 3:
        return _code_blocks(pixels - 128, quality, LUMINANCE).add_(128).clamp_(0, 255) / 255
    pixels = _pad(pixels, 2, 16)  # libjpeg continues chroma to the right before, and downwards after, halving it
    planes = torch.einsum("ij,bjhw->bihw", torch.tensor(TO_YCBCR).to(pixels), pixels).round()
    luma = _code_blocks(planes[:, :1] - 128, quality, LUMINANCE) + 128
    chroma = _code_blocks(_downsample(planes[:, 1:]), quality, CHROMINANCE)
    chroma = _upsample(chroma[..., : (height + 1) // 2, : (width + 1) // 2])  # without the padding
    planes = torch.cat((luma[..., :height, :width], chroma[..., :height, :width]), 1)
    return torch.einsum("ij,bjhw->bihw", torch.tensor(TO_RGB).to(pixels), planes).round().clamp_(0, 255) / 255


def _code_blocks(planes: Tensor, quality: int, table: tuple[int, ...]) -> Tensor:
    """Transform the 8×8 blocks of planes around 0, quantise them and transform back; rounded to whole pixels."""
    height, width = planes.shape[-2:]
    planes = _pad(planes, 8, 8)
    steps = _quantisation(quality, table).to(planes)
    cosines = _cosines().to(planes)
    blocks = planes.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)  # (…, 8, 8)
    coefficients = cosines @ blocks @ cosines.T
    blocks = cosines.T @ (_round_half_away(coefficients / steps) * steps) @ cosines
    restored = blocks.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return restored[..., :height, :width].round_().clamp_(-128, 127)


def _quantisation(quality: int, table: tuple[int, ...]) -> Tensor:
    """Compute the quantisation steps (8, 8) at a quality, as libjpeg scales them."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return torch.tensor([min(max((step * percent + 50) // 100, 1), 255) for step in table]).view(8, 8)


def _cosines() -> Tensor:
    """Compute the orthonormal cosine transform of 8 values, (frequency, position)."""
    frequency, position = torch.arange(8, dtype=torch.float64)[:, None], torch.arange(8, dtype=torch.float64)
    rows = torch.cos((2 * position + 1) * frequency * math.pi / 16) / 2
    rows[0] /= 2**0.5
    return rows


def _pad(planes: Tensor, rows: int, columns: int) -> Tensor:
    """Pad planes by their last row and column to multiples of these numbers."""
    down, right = -planes.shape[-2] % rows, -planes.shape[-1] % columns
    return F.pad(planes, (0, right, 0, down), mode="replicate") if down or right else planes


def _downsample(planes: Tensor) -> Tensor:
    """Downsample planes by two: means of four, rounded down and up in turn, as libjpeg does it."""
    turns = 1 + torch.arange(planes.shape[-1] // 2, device=planes.device) % 2
    return ((4 * F.avg_pool2d(planes, 2) + turns) / 4).floor()


def _upsample(planes: Tensor) -> Tensor:
    """Upsample planes by two: three quarters of the nearer value and one of the next, as libjpeg does it."""
    for axis in (2, 3):
        size = planes.shape[axis]
        before = planes.index_select(axis, torch.arange(-1, size - 1, device=planes.device).clamp_min(0))
        after = planes.index_select(axis, torch.arange(1, size + 1, device=planes.device).clamp_max(size - 1))
        pairs = torch.stack((0.75 * planes + 0.25 * before, 0.75 * planes + 0.25 * after), axis + 1)
        planes = pairs.flatten(axis, axis + 1)
    return planes


def _round_half_away(values: Tensor) -> Tensor:
    """Round halves away from zero, as codecs do: flat blocks have halves, which torch would round to even."""
    return values.sign() * (values.abs() + 0.5).floor()
