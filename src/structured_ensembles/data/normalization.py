"""Normalisation of inputs: a mean and a deviation per channel or column, part of the model's pipeline."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.devices import make_constant
from structured_ensembles.data.conversion import IN_UNIT_RANGE

CHOICES = ("auto", "none", "unit", "standard", "imagenet")
NOTICEABLE = 4  # squared distance of a column from mean 0 and log deviation 0 above which columns are standardised
CHUNK = 8192  # samples that are measured at a time
MEASURED = 1000  # samples by which float images are judged
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation for each channel or column (the second axis of a batch), or one for all of them.

    For uint8 pixels they refer to values in [0,1], to which pixels are scaled first.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise inputs (batch, channels or columns, …): floats, or pixels in [0,1]."""
        mean, deviation = self._moments_like(inputs)
        return (inputs - mean) / deviation

    def undo(self, inputs: Tensor) -> Tensor:
        """Return what inputs (batch, channels or columns, …) were before they were normalised."""
        mean, deviation = self._moments_like(inputs)
        return inputs * deviation + mean

    def _moments_like(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation in shapes that broadcast with inputs."""
        shape = (-1, *[1] * (inputs.dim() - 2))
        mean, deviation = (
            make_constant(values, inputs.device, inputs.dtype).view(shape) for values in (self.mean, self.deviation)
        )
        return mean, deviation

    @classmethod
    def of(cls, images: Tensor) -> Normalization:
        """Measure uint8 images (samples, channels, height, width)."""
        return cls.from_counts(count_values(images))

    @classmethod
    def from_counts(cls, counts: Tensor) -> Normalization:
        """Compute mean and deviation from how often each value occurs in each channel, (channels, 256)."""
        values = torch.arange(256, dtype=torch.float64) / 255
        means, deviations = [], []
        for counts_of_channel in counts:
            shares = counts_of_channel.double() / counts_of_channel.sum()
            mean = (shares * values).sum()
            variance = (shares * (values - mean).square()).sum()
            means.append(float(mean))
            deviations.append(float(variance.clamp_min(1e-12).sqrt()))
        return cls(tuple(means), tuple(deviations))

    @classmethod
    def of_columns(cls, inputs: Tensor, rows: Tensor) -> Normalization:
        """Measure the samples `rows` (samples,) of inputs (stored, columns, …); a constant column has deviation 1."""
        scale = 255 if inputs.dtype == torch.uint8 else 1
        columns = inputs.flatten(2) if inputs.dim() > 2 else inputs[:, :, None]
        count = len(rows) * columns.shape[2]

        def total(function: Callable[[Tensor], Tensor]) -> Tensor:
            """Sum function(chunk) over all samples, (columns,); a chunk is (samples, columns, values)."""
            sums = [function(columns[chunk_rows].double() / scale).sum((0, 2)) for chunk_rows in rows.split(CHUNK)]
            return torch.stack(sums).sum(0)

        first = columns[rows[0], :, :1].double() / scale
        mean = total(lambda values: values - first) / count + first[:, 0]
        deviation = (total(lambda values: (values - mean[:, None]).square()) / count).sqrt()
        is_constant = total(lambda values: (values != first).double()) == 0
        deviation[is_constant | (deviation < torch.finfo(torch.float32).tiny)] = 1
        return cls(tuple(mean.tolist()), tuple(deviation.tolist()))

    @classmethod
    def imagenet(cls) -> Normalization:
        """Return that of ImageNet's colour images, with which most published weights for images were trained."""
        return IMAGENET

    def noticeable(self) -> bool:
        """Tell whether some column is so far from mean 0 and deviation 1 that a network would learn badly from it."""
        moments = zip(self.mean, self.deviation, strict=True)
        return any(mean**2 + math.log(deviation) ** 2 > NOTICEABLE for mean, deviation in moments)

    def to_json(self) -> list[list[float]]:
        """Encode as two lists for JSON."""
        return [list(self.mean), list(self.deviation)]

    @classmethod
    def from_json(cls, value: list[list[float]] | None) -> Normalization | None:
        """Restore what `to_json` wrote; None stays None."""
        return None if value is None else cls(*(tuple(map(float, numbers)) for numbers in value))


def count_values(images: Tensor) -> Tensor:
    """Count how often each value occurs in each channel of uint8 images (samples, channels, …): (channels, 256)."""
    counts = torch.zeros(images.shape[1], 256, dtype=torch.int64)
    for channel in range(images.shape[1]):
        for chunk in images[:, channel].split(CHUNK):
            counts[channel] += torch.bincount(chunk.flatten().cpu(), minlength=256)
    return counts


RAW_PIXELS = Normalization((0.0,), (1 / 255,))  # from 0 to 255
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Choice = str | Normalization | tuple[Any, Any] | list[Any] | dict[str, Any] | None  # list and dict: of several inputs


def normalization_for(
    choice: Choice, inputs: Tensor, rows: Tensor | None = None, standardize: bool = True
) -> Normalization | None:
    """Resolve a choice for stored inputs (stored, …) to a normalisation; see `Data.from_arrays`.

    rows: the samples to learn from, (samples,); None where only some are known, such as those of a loader.
    standardize: whether "auto" standardises float columns.
    """
    pixels, images = inputs.dtype == torch.uint8, inputs.dim() == 4
    if choice is not None and not isinstance(choice, str):
        return _check_size(_parse_pair(choice), inputs)
    if choice not in (*CHOICES, None):
        raise ValueError(
            f"normalization must be one of {', '.join(map(repr, CHOICES))}, a Normalization or a pair (mean, "
            f"deviation), not {choice!r}"
        )
    if choice == "auto":
        if images and not pixels:
            _warn_of_unscaled_images(inputs, rows)
        if rows is None:
            return None
        if pixels:
            return Normalization.of(inputs) if images else None
        return _standardize_columns(inputs, rows) if standardize and inputs.dim() == 2 else None
    if choice in ("none", None):
        return RAW_PIXELS if pixels else None
    if choice == "unit":
        return None
    if choice == "standard":
        if rows is None:
            raise ValueError(
                "normalization='standard' needs all samples, but a loader gives them one batch after the other: "
                "give a pair (mean, deviation), or use Data.from_arrays or from_datasets"
            )
        return Normalization.of(inputs) if pixels and images else Normalization.of_columns(inputs, rows)
    return _check_size(IMAGENET, inputs)


def _warn_of_unscaled_images(images: Tensor, rows: Tensor | None) -> None:
    """Warn of floats (stored, channels, height, width) that were not scaled, such as pixels from 0 to 255."""
    if not images.numel():
        return
    low, high = float(images.min()), float(images.max())
    if max(abs(low), abs(high)) <= IN_UNIT_RANGE:
        return
    sample = torch.arange(len(images)) if rows is None else rows
    if not Normalization.of_columns(images, sample[:MEASURED]).noticeable():
        return
    scaled = "uint8 pixels, or values divided by 255" if low >= 0 and high <= 255 else "values of about that size"
    standard = "a pair normalization=(mean, deviation)" if rows is None else "normalization='standard'"
    warnings.warn(
        f"images are floats from {low:g} to {high:g}, which a network gets as they are, though it learns well from "
        f"values of about mean 0 and deviation 1 only: give {scaled}, or {standard}; normalization='none' says that "
        "they are to stay so",
        stacklevel=6,  # the line that calls Data.from_arrays or from_loaders
    )


def _standardize_columns(columns: Tensor, rows: Tensor) -> Normalization | None:
    """Measure columns and log that they are standardised; None if they nearly are already."""
    measured = Normalization.of_columns(columns, rows)
    if not measured.noticeable():
        return None
    low, high = min(measured.deviation), max(measured.deviation)
    log.warning(
        "%d columns are standardised: their deviations reach from %.3g to %.3g; standardize=False leaves them as they "
        "are",
        columns.shape[1],
        low,
        high,
    )
    return measured


def _parse_pair(choice: Any) -> Normalization:
    """Check and convert a Normalization, or a pair of numbers or of lists of numbers."""
    pair = (choice.mean, choice.deviation) if isinstance(choice, Normalization) else choice
    try:
        mean, deviation = (
            [numbers] if isinstance(numbers, Real) else [float(number) for number in numbers] for numbers in pair
        )
        means, deviations = tuple(map(float, mean)), tuple(map(float, deviation))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "normalization must be a Normalization or a pair (mean, deviation) of numbers, each one for all channels "
            f"or a list with one for every channel, not {choice!r}"
        ) from error
    if not all(map(math.isfinite, (*means, *deviations))) or min(deviations, default=0) <= 0:
        raise ValueError(f"normalization must have finite means and deviations above 0, not {choice!r}")
    longest = max(len(means), len(deviations))
    return Normalization(*(values * longest if len(values) == 1 else values for values in (means, deviations)))


def _check_size(normalization: Normalization, inputs: Tensor) -> Normalization:
    """Return a normalisation; raise a ValueError unless it fits the channels or columns of the inputs."""
    sizes = {len(normalization.mean), len(normalization.deviation)}
    if inputs.dim() < 2 or sizes not in ({1}, {inputs.shape[1]}):
        raise ValueError(
            f"normalization has {max(sizes)} means and deviations, but inputs of shape {tuple(inputs.shape[1:])} each "
            f"need one for all, or {inputs.shape[1] if inputs.dim() > 1 else 1}: one for each channel or column"
        )
    return normalization
