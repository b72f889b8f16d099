"""Checkpoints: one file, written atomically after every epoch, from which training goes on to the same weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from structured_ensembles.files import write_tensors


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    write_tensors(path, tensors, {"state": json.dumps(state)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the state; None if there is no checkpoint."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            return {name: file.get_tensor(name).clone() for name in file.keys()}, state  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a checkpoint of a training run ({error}): delete it to start anew") from error


def optimizer_tensors(prefix: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state (momentum and the like) as named tensors."""
    found = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                found[f"{prefix}{index}.{key}"] = torch.as_tensor(value)
    return found


def restore_optimizer(prefix: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    whole = optimizer.state_dict()
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            index, _, key = name.removeprefix(prefix).partition(".")
            whole["state"].setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict(whole)
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if value.shape == parameter.shape:  # in the parameter's layout too, as kernels for many tensors want it
                values[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)
