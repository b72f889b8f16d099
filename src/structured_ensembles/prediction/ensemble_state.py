"""The parts of an ensemble's state dict that are not weights: normalisation, units, Gaussian heads, calibration."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.calibration import Calibration
from structured_ensembles.data.kinds import Normalizations, normalization_from_json
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.target_scaling import Units


def extra_tensors(
    normalization: Normalization | Normalizations | None, units: Units | None, gaussian: bool, calibration: Calibration
) -> dict[str, Tensor]:
    """Encode what is set as tensors, by name; what is not set has no entry."""
    tensors = {}
    if normalization is not None:
        tensors["normalization"] = _encoded(normalization.to_json())
    if units is not None:
        tensors["units"] = torch.tensor([units.deviation, *units.mean], dtype=torch.double)
    if gaussian:
        tensors["gaussian"] = torch.tensor(True)
    if calibration.fitted:
        tensors["calibration"] = _encoded(calibration.to_json())
    return tensors


def pop_extra(
    state_dict: Any, prefix: str
) -> tuple[Normalization | Normalizations | None, Units | None, bool, Calibration | None]:
    """Remove and decode what `extra_tensors` wrote: normalisation, units, Gaussian heads or not, and a calibration."""
    moments = state_dict.pop(f"{prefix}normalization", None)
    units = state_dict.pop(f"{prefix}units", None)
    gaussian = bool(state_dict.pop(f"{prefix}gaussian", False))
    text = state_dict.pop(f"{prefix}calibration", None)
    return (
        None if moments is None else normalization_from_json(_decoded(moments)),
        None if units is None else Units(tuple(units[1:].tolist()), float(units[0])),
        gaussian,
        None if text is None else Calibration.from_json(_decoded(text)),
    )


def _encoded(value: Any) -> Tensor:
    """JSON as bytes in a tensor, which every way of storing a state dict takes."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
