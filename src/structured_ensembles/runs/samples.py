"""The file of a run with tensors of single samples: confidences, entropies, disagreement; see `measure_experiment`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from structured_ensembles.storage.container import read_container, write_container
from structured_ensembles.storage.files import check_regular

SAMPLES = "samples.safetensors"
SAMPLES_FORM = "structured-ensembles-samples"


def read_samples(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of single samples; return an empty dict if they were not measured or are damaged."""
    path = folder / SAMPLES
    if not path.exists():
        return {}
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            checked = bool(file.metadata())  # earlier versions wrote no checksum
        tensors = read_container(path, SAMPLES_FORM, 1, "samples of a run")[1] if checked else load_file(path)
        _check_samples(tensors)
        return tensors
    except (OSError, SafetensorError, ValueError) as error:
        warnings.warn(
            f"{path} is damaged ({error}): its figures of single samples are left out, or measured again", stacklevel=2
        )
        return {}


def write_samples(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of single samples, see `read_samples`."""
    write_container(folder / SAMPLES, SAMPLES_FORM, 1, {}, tensors)


def _check_samples(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless the tensors of single samples are complete and consistent."""
    for name in ("confidence", "correct", "entropy", "disagreement"):
        if name not in tensors:
            raise ValueError(f"it has no {name}")
    samples = tensors["confidence"].shape
    matrix = tensors["disagreement"].shape
    aligned = all(tensors[name].shape == samples for name in ("correct", "entropy")) and len(samples) == 1
    if not aligned or len(matrix) != 2 or matrix[0] != matrix[1] or tensors.get("noisy", tensors["entropy"]).dim() != 1:
        raise ValueError("its shapes do not fit each other")
    if tensors["correct"].dtype != torch.bool or not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError("its values are not those of samples")
