"""corrupt(): corruptions by name, for images of any size, seeded by sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions import blur, digital, jpeg, noise, weather
from structured_ensembles.evaluation.corruptions.filters import quantize
from structured_ensembles.evaluation.corruptions.randomness import Draws

Corruption = Callable[[Tensor, int, Draws], Tensor]
# The fifteen of the benchmark, in its order, and the four extra ones that it keeps for validation.
CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": weather.spatter,
    "saturate": digital.saturate,
}
STANDARD, EXTRA = tuple(CORRUPTIONS)[:15], tuple(CORRUPTIONS)[15:]  # evaluate() takes a mean over each
ORIGIN = (
    "Corruptions are computed by our own code, which follows the published generator of CIFAR-10-C. The ice of frost "
    "is ours too: the photographs that the generator lays over images may not be shipped."
)
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 8  # pixels
CHUNK = {"cpu": 2**20, "cuda": 2**25}  # values processed at once: what fits into a CPU cache, and into a GPU


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0, *, first: int = 0) -> Tensor:
    """Corrupt images (batch, channels, height, width) with pixels in [0,1], on the device they are on.

    At 32×32 pixels the result is what the published generator of CIFAR-10-C gives, its bugs included, for the same
    random numbers; only frost draws its own ice. It is cut to 8 bits, as the official arrays are. Lengths grow with
    the images.

    name: one of `CORRUPTIONS`. severity: 1 to 5; for some, images come closer to the original as it grows.
    seed, first: the random numbers of an image depend only on the seed, the name and the image's index in its data
        set; `first` is the index of the first image here. So the batch size does not change the result.
    """
    check_name(name)
    check_severity(severity)
    check_images(images)
    size = max(1, CHUNK.get(images.device.type, CHUNK["cuda"]) // max(1, images.shape[1:].numel()))
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), size):
        chunk = images[start : start + size].float()
        numbers = torch.arange(first + start, first + start + len(chunk), device=images.device)
        draws = Draws(seed, numbers, name)
        result[start : start + size] = quantize(CORRUPTIONS[name](chunk, severity, draws).clamp(0, 1))
    return result


def check_name(name: str, argument: str = "name") -> None:
    """Raise a ValueError unless `name` is a corruption."""
    if name not in CORRUPTIONS:
        raise ValueError(f"{argument} must be one of {', '.join(CORRUPTIONS)}, not {name!r}")


def check_severity(severity: int, argument: str = "severity") -> None:
    """Raise a ValueError unless `severity` is an integer from 1 to 5."""
    if severity not in SEVERITIES or isinstance(severity, float):
        raise ValueError(f"{argument} must be one of {', '.join(map(str, SEVERITIES))}, not {severity!r}")


def check_images(images: Tensor) -> None:
    """Raise a ValueError unless `images` are float images in [0,1] that are large enough to corrupt."""
    if images.dim() != 4 or not images.is_floating_point() or images.shape[1] not in (1, 3):
        raise ValueError(
            "images must be floats of shape (batch, 1 or 3 channels, height, width), "
            f"not {images.dtype} of shape {tuple(images.shape)}"
        )
    if min(images.shape[-2:]) < SMALLEST:
        raise ValueError(f"images must have at least {SMALLEST}×{SMALLEST} pixels, not {tuple(images.shape[-2:])}")
    if len(images) and not (float(images.min()) >= 0 and float(images.max()) <= 1):
        low, high = float(images.min()), float(images.max())
        raise ValueError(f"images must have pixels in [0,1], but reach from {low:g} to {high:g}")
