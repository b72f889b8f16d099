"""Weighted samples: equal rows merged to one with a weight, and losses whose targets carry the weight.

A batch is a pair (inputs, targets), so a weight travels as the last column of the targets, wherever they are shuffled
or split. Merging makes weights exact in training by mini-batches: a sample of weight 3 and three equal samples become
the same row with the same weight, and so the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from structured_ensembles.common.devices import make_constant

MAX_REPEATED = 1_000_000  # samples that `repeat_whole` makes at most


def merge_equal_rows(
    inputs: NDArray[np.float32], targets: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return one row number for every distinct sample of positive weight, and the summed weights, both (distinct,).

    inputs: (samples, columns). targets: (samples,) or (samples, values). weights: (samples,), not negative.
    Rows are sorted by their content, so that neither the order of the samples nor how often they are repeated counts.
    """
    positive = np.flatnonzero(weights > 0)
    content = np.hstack((_bytes_of(inputs[positive]), _bytes_of(targets.reshape(len(targets), -1)[positive])))
    keys = content.view(np.dtype((np.void, content.shape[1]))).ravel()
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    totals: NDArray[np.float64] = np.bincount(inverse, weights=weights[positive]).astype(np.float64)
    return positive[first], totals


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of each row of floats (rows, columns); -0.0 has those of 0.0, which it equals."""
    return np.ascontiguousarray(np.where(values == 0, values.dtype.type(0), values)).view(np.uint8)


def repeat_whole(weights: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return row numbers in which each row stands as often as its weight (rows,) says, if all are whole numbers.

    Else, or if they would be too many, each row stands once.
    """
    rows = np.arange(len(weights))
    whole = bool((weights == np.round(weights)).all()) and weights.sum() <= MAX_REPEATED
    return np.repeat(rows, weights.astype(np.intp)) if whole else rows


def attach_weights(targets: NDArray[np.float64], weights: NDArray[np.float64]) -> Tensor:
    """Return targets (samples, values + 1) in float32 whose last column are the weights, divided by their mean."""
    relative = weights / weights.mean() if len(weights) else weights
    return torch.from_numpy(np.column_stack((targets, relative)).astype(np.float32))


def weighted_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Average weight · cross-entropy; outputs: logits (batch, classes). targets: labels and weights, (batch, 2)."""
    costs = F.cross_entropy(outputs, targets[:, 0].long(), reduction="none")
    return (costs * targets[:, 1]).mean()


def weighted_squared_error(outputs: Tensor, targets: Tensor, deviations: Sequence[float]) -> Tensor:
    """Average weight · squared error; outputs: (batch, values). targets: values and weights, (batch, values + 1).

    deviations: of each value, by which its errors are divided, so that values of any scale count the same.
    """
    values = targets[:, :-1]
    errors = (outputs.view_as(values) - values) / make_constant(tuple(deviations), outputs.device, outputs.dtype)
    return (errors.square().mean(1) * targets[:, -1]).mean()
