"""Reliability: confidence and accuracy of predictions in bins of confidence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FEWEST = 5  # samples of a bin: fewer are only noise


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence: their mean confidence, their accuracy, and how many they are."""

    confidence: float
    accuracy: float
    samples: int


def bin_confidence(confidence: Tensor, correct: Tensor, bins: int = 10) -> list[Bin]:
    """Sort predictions into equal bins of confidence, shapes (samples,); bins of fewer than five are left out."""
    index = (confidence.double() * bins).ceil().clamp(1, bins).long() - 1
    members = [index == number for number in range(bins)]
    return [
        Bin(float(confidence[member].double().mean()), float(correct[member].double().mean()), int(member.sum()))
        for member in members
        if int(member.sum()) >= FEWEST
    ]
