"""Noise corruptions, with CIFAR-10-C's severities: in units of brightness, they hold for any image size."""

from torch import Tensor

from structured_ensembles.evaluation.corruptions.randomness import Draws


def gaussian_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add Gaussian noise of the same deviation everywhere."""
    deviation = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return images + deviation * draws.normal("noise", images.shape[1:])


def shot_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Draw photon counts from a Poisson distribution, given the mean count of a white pixel."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return draws.poisson("noise", images * photons) / photons


def impulse_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add salt and pepper: make a share of the values fully dark or fully bright."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    chance = draws.uniform("noise", images.shape[1:])
    return images.masked_fill(chance < share / 2, 0.0).masked_fill(chance > 1 - share / 2, 1.0)


def speckle_noise(images: Tensor, severity: int, draws: Draws) -> Tensor:
    """Add noise in proportion to the brightness."""
    deviation = (0.06, 0.10, 0.12, 0.16, 0.20)[severity - 1]
    return images * (1 + deviation * draws.normal("noise", images.shape[1:]))
