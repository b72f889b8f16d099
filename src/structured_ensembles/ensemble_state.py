"""The parts of an ensemble's state dict that are not weights: units, Gaussian heads and calibration, as tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.calibration import Calibration
from structured_ensembles.units import Units


def extra_tensors(units: Units | None, gaussian: bool, calibration: Calibration) -> dict[str, Tensor]:
    """Encode what is set as tensors, by name; what is not set has no entry."""
    tensors = {}
    if units is not None:
        tensors["units"] = torch.tensor([units.deviation, *units.mean], dtype=torch.double)
    if gaussian:
        tensors["gaussian"] = torch.tensor(True)
    if calibration.fitted:
        text = json.dumps(calibration.to_json()).encode()
        tensors["calibration"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors


def pop_extra(state_dict: Any, prefix: str) -> tuple[Units | None, bool, Calibration | None]:
    """Remove and decode what `extra_tensors` wrote: units, whether heads are Gaussian, and a calibration, if any."""
    units = state_dict.pop(f"{prefix}units", None)
    gaussian = bool(state_dict.pop(f"{prefix}gaussian", False))
    text = state_dict.pop(f"{prefix}calibration", None)
    return (
        None if units is None else Units(tuple(units[1:].tolist()), float(units[0])),
        gaussian,
        None if text is None else Calibration.from_json(json.loads(bytes(text.tolist()))),
    )
