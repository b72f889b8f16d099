"""Learned: the description of a learned task."""

from __future__ import annotations

from dataclasses import dataclass

from structured_ensembles.data import Normalization


@dataclass(frozen=True)
class Learned:
    """Description of a learned task, without its weights.

    classes: the labels of its classes in the whole data set. names: of the classes. losses: of every epoch.
    pixels: whether inputs are uint8 pixels.
    """

    classes: tuple[int, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    normalization: Normalization | None
    losses: tuple[float, ...] = ()
    pixels: bool = False
