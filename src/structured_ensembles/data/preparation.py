"""Prepare stored inputs for a network: pixels and other floats normalised, ids and masks as such."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, map_inputs
from structured_ensembles.data.kinds import Kind, Kinds, Normalizations, kinds_of, normalization_of_each
from structured_ensembles.data.normalization import Normalization


def prepare_inputs(
    inputs: Inputs,
    dtype: torch.dtype,
    normalization: Normalization | Normalizations | None,
    ids: bool,
    kinds: Kinds | None = None,
) -> Any:
    """Prepare inputs (batch, …) for a network: as normalised floats, or as ids. Copies nothing from or to the host.

    kinds: what each of several inputs was in training; by default what its type says.
    """
    if not isinstance(inputs, Tensor):

        def prepare_one(tensor: Tensor, kind: Kind, moments: Normalization | None) -> Any:
            return tensor.bool() if kind == "mask" else prepare_inputs(tensor, dtype, moments, kind == "whole numbers")

        return map_inputs(
            prepare_one, inputs, kinds or kinds_of(inputs, ids), normalization_of_each(normalization, inputs)
        )
    assert not isinstance(normalization, Normalizations)
    if ids:
        return inputs.long()
    if normalization is None:
        return as_floats(inputs, dtype)
    # Columns may be larger than half precision can hold before they are normalised; pixels in [0,1] are not.
    exact = dtype if inputs.dtype == torch.uint8 else torch.promote_types(dtype, torch.float32)
    return normalization(as_floats(inputs, exact)).to(dtype)


def prepare_targets(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Prepare targets for the loss of a network of this dtype: labels stay, numbers become at least float32.

    Losses are computed so; in float16 targets above 65,504 would be infinite.
    """
    return targets.to(torch.promote_types(dtype, torch.float32)) if targets.is_floating_point() else targets


def as_floats(inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert pixels to floats in [0,1]; other values stay. The result is contiguous, as a network's `view` expects."""
    contiguous = inputs.contiguous()
    if (
        1 in inputs.shape
    ):  # an axis of size 1 may have any stride: a convolution could take grey images for channels last
        contiguous = contiguous.flatten().view(inputs.shape)
    return contiguous.to(dtype) / 255 if inputs.dtype == torch.uint8 else contiguous.to(dtype)
