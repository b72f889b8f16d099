"""Normalisation of images: the channels' mean and deviation, part of the model's pipeline rather than of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structured_ensembles.devices import constant


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of the pixels in [0,1], for each channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """(batch, channels, height, width), in [0,1], to values of mean 0 and deviation 1."""
        mean, deviation = (
            constant(values, pixels.device, pixels.dtype)[:, None, None] for values in (self.mean, self.deviation)
        )
        return (pixels - mean) / deviation

    @classmethod
    def of(cls, images: Tensor) -> Normalization:
        """Of uint8 images (samples, channels, height, width), by counting how often each value occurs."""
        values = torch.arange(256, dtype=torch.float64) / 255
        means, deviations = [], []
        for channel in range(images.shape[1]):
            counts = torch.zeros(256, dtype=torch.int64)
            for piece in images[:, channel].split(8192):
                counts += torch.bincount(piece.flatten().cpu(), minlength=256)
            shares = counts.double() / counts.sum()
            mean = (shares * values).sum()
            variance = (shares * (values - mean).square()).sum()
            means.append(float(mean))
            deviations.append(float(variance.clamp_min(1e-12).sqrt()))
        return cls(tuple(means), tuple(deviations))
