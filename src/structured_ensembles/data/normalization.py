"""Normalisation of images: the channels' mean and deviation, part of the model's pipeline rather than of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of the pixels in [0,1], for each channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """(batch, channels, height, width), in [0,1], to values of mean 0 and deviation 1."""
        mean, deviation = (
            torch.tensor(values, device=pixels.device, dtype=pixels.dtype)[:, None, None]
            for values in (self.mean, self.deviation)
        )
        return (pixels - mean) / deviation

    @classmethod
    def of(cls, images: Tensor) -> Normalization:
        """Of uint8 images (samples, channels, height, width); in pieces, to spare memory."""
        total = torch.zeros(images.shape[1], dtype=torch.float64)
        squares = torch.zeros_like(total)
        for piece in images.split(4096):
            pixels = piece.double() / 255
            total += pixels.sum((0, 2, 3))
            squares += pixels.square().sum((0, 2, 3))
        mean = total / (images.numel() / images.shape[1])
        deviation = (squares / (images.numel() / images.shape[1]) - mean.square()).clamp_min(1e-12).sqrt()
        return cls(tuple(mean.tolist()), tuple(deviation.tolist()))
