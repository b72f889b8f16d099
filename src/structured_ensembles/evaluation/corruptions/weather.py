"""Weather corruptions, with CIFAR-10-C's severities in pixels of 32×32 images; lengths grow with the images."""

import torch
from torch import Tensor

from structured_ensembles.evaluation.corruptions import edges, filters
from structured_ensembles.evaluation.corruptions.filters import length_scale
from structured_ensembles.evaluation.corruptions.randomness import Draws

WATER, MUD = (175 / 255, 238 / 255, 238 / 255), (63 / 255, 42 / 255, 20 / 255)  # red, green, blue
# Of pieces of the published photographs of ice: their mean colour, their contrast (deviation of the brightness within a
# piece), and how much their mean brightness differs (deviation); the second and third photograph are the same.
PANES = (
    ((0.31, 0.58, 0.65), 0.06, 0.04),
    ((0.78, 0.79, 0.83), 0.07, 0.035),
    ((0.78, 0.79, 0.83), 0.07, 0.035),
    ((0.56, 0.62, 0.67), 0.10, 0.04),
    ((0.41, 0.45, 0.50), 0.135, 0.06),
)
BOX = torch.full((3, 3), 1 / 9)
RELIEF = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])


def brightness(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add light, at the same hue and saturation."""
    added = (0.05, 0.10, 0.15, 0.20, 0.30)[severity - 1]
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp_max(1.0)
    return torch.where(value > 1e-6, images * (brighter / value.clamp_min(1e-6)), brighter)


def fog(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Lay fractal clouds of a given thickness over the image; what is behind them loses contrast."""
    thickness, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    brightest = images.amax((1, 2, 3), keepdim=True)
    cloud = filters.fractal_noise(draws, "fog", _size(images), decay**2)[:, None]
    return (images + thickness * cloud) * brightest / (brightest + thickness)


def frost(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Lay ice over the image, as on a window in front of the camera.

    The published generator lays pieces of five photographs over it, which we may not ship. Shares are as published;
    the ice is grown, with the colours and the contrasts of those photographs (`PANES`).
    """
    image_share, frost_share = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    return image_share * images + frost_share * _ice(images, draws)


def snow(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add flakes that fall in streaks in front of a paler scene."""
    mean, deviation, zoom, floor, radius, sigma, clear = (
        (0.10, 0.2, 1.00, 0.60, 8, 3, 0.95),
        (0.10, 0.2, 1.00, 0.50, 10, 4, 0.90),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.90),
        (0.25, 0.3, 2.25, 0.60, 12, 6, 0.85),
        (0.30, 0.3, 1.25, 0.65, 14, 12, 0.80),
    )[severity - 1]
    scale = length_scale(images)
    flakes = mean + deviation * draws.normal("flakes", _size(images))
    flakes = filters.magnify(flakes, zoom)
    flakes = filters.quantize(flakes.masked_fill(flakes < floor, 0.0).clamp_max(1.0))[:, None]
    if scale > 1:
        flakes = filters.magnify(flakes, scale)
    flakes = filters.streak(flakes, draws.uniform("fall", (), -135, -45), scale * sigma, scale * radius)
    flakes = filters.quantize(flakes, rounded=True)
    pale = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return clear * images + (1 - clear) * pale + flakes + flakes.rot90(2, (2, 3))


def spatter(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Put drops on the lens: water, and at the higher severities mud."""
    mean, deviation, sigma, floor, strength, mud = (
        (0.62, 0.1, 0.7, 0.70, 0.5, False),
        (0.65, 0.1, 0.8, 0.70, 0.5, False),
        (0.65, 0.3, 1.0, 0.69, 0.5, False),
        (0.65, 0.1, 0.7, 0.69, 0.6, True),
        (0.65, 0.1, 0.5, 0.68, 0.6, True),
    )[severity - 1]
    scale = length_scale(images)
    liquid = mean + deviation * filters.smooth_noise(draws.normal("drops", _size(images)), sigma, scale)
    if mud:
        cover = filters.gaussian_blur((liquid > floor).to(images.dtype), scale * strength)
        cover = cover.masked_fill(cover < 0.8, 0.0)[:, None]
        return images * (1 - cover) + cover * _colour(images, MUD)
    return images + strength * _shine(liquid.masked_fill(liquid < floor, 0.0), scale)[:, None] * _colour(images, WATER)


def _shine(liquid: Tensor, scale: float) -> Tensor:
    """Compute the brightness of drops, (batch, height, width), at most 1, lit from one corner.

    Step by step as published: edges of the drops, distances to them, their histogram equalised, their relief.
    """
    liquid = (255 * liquid).clamp(0, 255).floor()
    depth = edges.edge_distances(edges.canny(liquid, 50, 150), 20 * scale)[:, None]
    depth = edges.equalize((filters.convolve(depth, BOX) + 1e-5).floor().clamp_max(255)[:, 0])[:, None]
    relief = filters.convolve(depth, RELIEF).clamp(0, 255)
    shine = liquid * filters.convolve(relief, BOX).round()[:, 0]
    return shine / shine.amax((1, 2), keepdim=True).clamp_min(1e-6)


def _ice(images: Tensor, draws: Draws) -> Tensor:
    """Draw ice (batch, 1 or 3, height, width) in [0,1], with a random pane for each image."""
    texture = _crystals(images, draws)[:, None]
    texture = (texture - texture.mean((2, 3), keepdim=True)) / texture.std((2, 3), keepdim=True).clamp_min(1e-6)
    colours, contrasts, shades = (torch.tensor(column).to(images) for column in zip(*PANES, strict=True))
    pane = draws.integers("pane", (), 0, len(PANES))
    shade = shades[pane] * draws.normal("shade")
    colour = colours[pane] if images.shape[1] == 3 else _grey(colours[pane][..., None, None])[..., 0, 0]
    bright = (colour + shade[:, None])[..., None, None]
    return (bright + contrasts[pane][:, None, None, None] * texture).clamp(0, 1)


def _crystals(images: Tensor, draws: Draws) -> Tensor:
    """Grow a texture of ice (batch, height, width): patches, needles in them at 60° to each other, and grain."""
    size, scale = _size(images), length_scale(images)
    patches = filters.fractal_noise(draws, "patches", size, 2.2)
    veins = (1 - (2 * filters.fractal_noise(draws, "veins", size, 1.8) - 1).abs()).pow(4)
    direction = draws.uniform("direction", (), 0, 60)
    needles = torch.zeros_like(patches)
    for turn in range(6):
        seeds = (draws.uniform(f"seeds {turn}", size) > 1 - 0.02 / scale).to(patches)[:, None]
        grown = filters.streak(seeds, direction + 60 * turn, 3.5 * scale, 4.5 * scale)[:, 0]
        needles += grown * (3.5 * scale)
    grain = 0.15 * draws.normal("grain", size)
    return (0.7 * patches.pow(1.5) + 0.4 * veins + 0.5 * needles * (0.4 + patches)).clamp_max(1.0) + grain


def _size(images: Tensor) -> tuple[int, int]:
    """Return (height, width) of the images."""
    height, width = images.shape[-2:]
    return height, width


def _grey(images: Tensor) -> Tensor:
    """Compute the perceived brightness, (batch, 1, height, width)."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor([0.299, 0.587, 0.114]).to(images)[:, None, None]).sum(1, keepdim=True)


def _colour(images: Tensor, colour: tuple[float, float, float]) -> Tensor:
    """Return a colour in as many channels as the images have: (3, 1, 1), or its brightness (1, 1, 1)."""
    tensor = torch.tensor(colour).to(images)[:, None, None]
    return tensor if images.shape[1] == 3 else _grey(tensor[None])[0]
