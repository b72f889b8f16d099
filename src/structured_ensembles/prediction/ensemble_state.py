"""Entries of an ensemble's state dict besides weights: normalisation, units, Gaussian heads, calibration."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.calibration import Calibration
from structured_ensembles.data.kinds import Normalizations, normalization_from_json
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.target_scaling import Units


def encode_extra(
    normalization: Normalization | Normalizations | None, units: Units | None, gaussian: bool, calibration: Calibration
) -> dict[str, Tensor]:
    """Encode as named tensors; an attribute that is not set has no entry."""
    tensors = {}
    if normalization is not None:
        tensors["normalization"] = _encode(normalization.to_json())
    if units is not None:
        tensors["units"] = torch.tensor([units.deviation, *units.mean], dtype=torch.double)
    if gaussian:
        tensors["gaussian"] = torch.tensor(True)
    if calibration.fitted:
        tensors["calibration"] = _encode(calibration.to_json())
    return tensors


def pop_extra(
    state_dict: Any, prefix: str
) -> tuple[Normalization | Normalizations | None, Units | None, bool, Calibration | None]:
    """Remove and decode what `encode_extra` wrote: normalisation, units, Gaussian heads or not, and a calibration."""
    normalization = state_dict.pop(f"{prefix}normalization", None)
    units = state_dict.pop(f"{prefix}units", None)
    gaussian = bool(state_dict.pop(f"{prefix}gaussian", False))
    calibration = state_dict.pop(f"{prefix}calibration", None)
    return (
        None if normalization is None else normalization_from_json(_decode(normalization)),
        None if units is None else Units(tuple(units[1:].tolist()), float(units[0])),
        gaussian,
        None if calibration is None else Calibration.from_json(_decode(calibration)),
    )


def _encode(value: Any) -> Tensor:
    """Encode a value as the bytes of its JSON in a tensor, which every way of storing a state dict accepts."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    """Decode what `_encode` made."""
    return json.loads(bytes(text.tolist()))
