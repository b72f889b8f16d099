"""Outputs of an ensemble on arrays, datasets, loaders or splits: batch after batch, each one checked."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, move_inputs
from structured_ensembles.data.batching import batches_of
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.modes import evaluation_mode
from structured_ensembles.prediction.input_checks import check_batch, explain_shape_errors


def compute_outputs(ensemble: Any, x: Any, batch_size: int) -> Tensor:
    """Return the outputs (members, samples, …) of an ensemble in evaluation mode, on the CPU."""
    batches = batches_of(x, batch_size, ensemble.ids, ensemble.input_shape, ensemble.pixels)
    with torch.inference_mode(), evaluation_mode(ensemble):
        outputs = [_batch_outputs(ensemble, batch) for batch in batches]
    return torch.cat(outputs, dim=1)


def _batch_outputs(ensemble: Any, batch: Inputs) -> Tensor:
    """Check a batch (samples, …) and return its outputs (members, samples, …), on the CPU."""
    check_batch(ensemble, batch, dtype_of(ensemble))
    with explain_shape_errors(batch, ensemble.input_shape, ensemble.ids):
        return ensemble(move_inputs(batch, device_of(ensemble))).cpu()  # type: ignore[no-any-return]


def reshape_like_targets(shape: tuple[int, ...] | None, values: Tensor) -> Tensor:
    """Reshape values (samples, …) like targets, of which one has `shape`, if they have as many numbers."""
    full_shape = None if shape is None else (len(values), *shape)
    return values if full_shape is None or math.prod(full_shape) != values.numel() else values.reshape(full_shape)
