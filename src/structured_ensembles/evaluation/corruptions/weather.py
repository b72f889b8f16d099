"""Weather. Severities are those published for CIFAR-10-C; lengths are in pixels of 32×32 and grow with the images."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions import filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws

FROST, WATER, MUD = (0.85, 0.95, 1.0), (0.686, 0.933, 0.933), (0.247, 0.165, 0.078)  # red, green, blue


def brightness(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """More light, at the same hue and saturation."""
    added = (0.05, 0.10, 0.15, 0.20, 0.30)[severity - 1]
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp_max(1.0)
    return torch.where(value > 1e-6, images * (brighter / value.clamp_min(1e-6)), brighter)


def fog(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Fractal clouds of a given thickness; what is behind them loses contrast."""
    thickness, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    brightest = images.amax((1, 2, 3), keepdim=True)
    cloud = filters.clouds(draws, "fog", _size(images), decay**2)[:, None]
    return (images + thickness * cloud) * brightest / (brightest + thickness)


def frost(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Ice crystals on the window in front of the camera.

    The published one lays photographs of ice over the image. Ours are grown, and so the shares are ours, near theirs.
    """
    image_share, frost_share = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.45), (0.75, 0.55))[severity - 1]
    ice = _crystals(images, draws)[:, None] * _colour(images, FROST)
    return image_share * images + frost_share * ice


def snow(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Flakes that fall in streaks, in front of a scene turned pale.

    At 3 and 5 flakes start at a brightness 0.05 below the published one, or there would be fewer of them than before.
    """
    mean, deviation, zoom, floor, radius, sigma, clear = (
        (0.10, 0.2, 1.00, 0.60, 8, 3, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4, 0.90),
        (0.15, 0.3, 1.75, 0.50, 10, 4, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6, 0.85),
        (0.30, 0.3, 1.25, 0.60, 14, 12, 0.80),
    )[severity - 1]
    scale = length_scale(images)
    flakes = mean + deviation * draws.normal("flakes", _size(images))
    flakes = filters.magnified(flakes, zoom)
    flakes = flakes.masked_fill(flakes < floor, 0.0).clamp_max(1.0)[:, None]
    flakes = filters.magnified(flakes, max(1.0, scale))
    flakes = filters.streaked(flakes, draws.uniform("fall", (), -135, -45), scale * sigma, scale * radius)
    pale = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return clear * images + (1 - clear) * pale + flakes + flakes.rot90(2, (2, 3))


def spatter(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Drops on the lens: water, and at the higher severities mud.

    Where drops are is as published; how water shines is ours, and a little weaker, so that mud is the worse of the two.
    """
    mean, deviation, sigma, floor, strength, mud = (
        (0.62, 0.1, 0.7, 0.70, 0.35, False),
        (0.65, 0.1, 0.8, 0.70, 0.35, False),
        (0.65, 0.3, 1.0, 0.69, 0.28, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    )[severity - 1]
    scale = length_scale(images)
    liquid = mean + deviation * filters.smooth_noise(draws.normal("drops", _size(images)), sigma, scale)
    drops = liquid > floor
    if mud:
        cover = filters.gaussian_blur(drops.to(images.dtype), scale * strength)
        cover = cover.masked_fill(cover < 0.8, 0.0)[:, None]
        return images * (1 - cover) + cover * _colour(images, MUD)
    # Light from one corner: a drop shines where its surface rises towards it.
    relief = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    depth = filters.gaussian_blur(drops.to(images.dtype), scale * 0.5)[:, None]
    shine = filters.convolved(depth, relief).clamp_min(0) * drops[:, None]
    shine = (shine / shine.amax((2, 3), keepdim=True).clamp_min(1e-6)).square()
    return images + strength * shine * _colour(images, WATER)


def _crystals(images: Tensor, draws: Draws) -> Tensor:
    """A texture of ice (batch, height, width) in [0,1]: patches, with needles growing in them at 60° to each other."""
    size, scale = _size(images), length_scale(images)
    patches = filters.clouds(draws, "patches", size, 2.2)
    veins = (1 - (2 * filters.clouds(draws, "veins", size, 1.8) - 1).abs()).pow(4)
    direction = draws.uniform("direction", (), 0, 60)
    needles = torch.zeros_like(patches)
    for turn in range(6):
        seeds = (draws.uniform(f"seeds {turn}", size) > 1 - 0.02 / scale).to(patches)[:, None]
        grown = filters.streaked(seeds, direction + 60 * turn, 3.5 * scale, 9 * scale)[:, 0]
        needles += grown * (3.5 * scale)
    return (0.7 * patches.pow(1.5) + 0.4 * veins + 0.5 * needles * (0.4 + patches)).clamp_max(1.0)


def _size(images: Tensor) -> tuple[int, int]:
    height, width = images.shape[-2:]
    return height, width


def _grey(images: Tensor) -> Tensor:
    """Brightness as eyes see it, (batch, 1, height, width)."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor([0.299, 0.587, 0.114]).to(images)[:, None, None]).sum(1, keepdim=True)


def _colour(images: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """The colour as images of this many channels have it: shape (3, 1, 1), or its brightness alone."""
    tensor = torch.tensor(colour).to(images)[:, None, None]
    return tensor if images.shape[1] == 3 else _grey(tensor[None])[0]
