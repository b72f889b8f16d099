"""Checkpoints: one file, written atomically after an epoch, from which training resumes to the same weights.

A checkpoint is a container with a checksum, like an ensemble's file. Files of earlier versions lack the checksum and
are read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from structured_ensembles.networks.state import check_fits, unsaved_buffers
from structured_ensembles.storage.container import (
    ArtifactError,
    check_field,
    raise_as_artifact_error,
    read_container,
    write_container,
)
from structured_ensembles.storage.files import check_regular

FORMAT = "structured-ensembles-checkpoint"
VERSION = 1
SGD, ADAM = {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}  # an optimizer's state tensors per parameter
MAX_STEPS = 2**53
LEGACY_ENTRY = "state"  # metadata of files of earlier versions, which lack a checksum and non-persistent buffers


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write named tensors and a state that JSON can hold, with a list of the tensors, which reveals a missing one."""
    write_container(path, FORMAT, VERSION, {**state, "tensors": sorted(tensors)}, tensors)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read and check the tensors and the state; return None if there is no checkpoint."""
    if not path.exists():
        return None
    try:
        with raise_as_artifact_error(f"{path} is damaged"):
            check_regular(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if LEGACY_ENTRY in metadata:
                    state = check_field(json.loads(metadata[LEGACY_ENTRY]), dict, "its state")
                    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                    return tensors, {**state, "earlier_version": True}
        state, tensors = read_container(path, FORMAT, VERSION, "a checkpoint")
        if state.pop("tensors", None) != sorted(tensors):
            raise ArtifactError(f"{path} does not have the tensors that it lists")
    except ArtifactError as error:
        raise ArtifactError(
            f"{path} is not a checkpoint of a training run ({error}): delete it to start anew"
        ) from error
    return {name: tensor.clone() for name, tensor in tensors.items()}, state


def is_member_tensor(name: str, members: int) -> bool:
    """Tell whether a checkpoint of `members` networks may have a tensor of this name, such as "0.best.fc.weight"."""
    number, role, *_ = [*name.split(".", 2), ""]
    return number.isdecimal() and int(number) < members and role in ("now", "best", "optimizer", "average")


def check_complete(network: nn.Module, tensors: Mapping[str, Tensor], earlier_version: bool) -> None:
    """Raise a ValueError unless `tensors` are the state of the network, in its shapes.

    Only non-persistent buffers may be missing or have another size.
    """
    optional = unsaved_buffers(network)
    if earlier_version and optional:
        raise ValueError(f"an earlier version wrote it, without the non-persistent buffer {min(optional)}")
    check_fits(network, tensors)


def flatten_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state (momentum and the like) as named tensors, such as "0.momentum_buffer"."""
    tensors = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                tensors[f"{index}.{key}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `flatten_optimizer_state` returned; raise a ValueError if it is another optimizer's."""
    state_dict = optimizer.state_dict()
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        states.setdefault(int(number), {})[key] = tensor
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in states.items():
        _check_state(index, state, parameters, SGD if isinstance(optimizer, torch.optim.SGD) else ADAM)
    state_dict["state"] |= states
    optimizer.load_state_dict(state_dict)
    for parameter, values in optimizer.state.items():
        for key in values.keys() - {"step"}:  # fused kernels need the parameter's memory layout, too
            values[key] = torch.empty_like(parameter, requires_grad=False).copy_(values[key])


def _check_state(index: int, state: Mapping[str, Tensor], parameters: Sequence[Tensor], keys: set[str]) -> None:
    """Raise a ValueError unless the state fits its parameter: fused kernels write past the end of a short tensor."""
    if not 0 <= index < len(parameters):
        raise ValueError(f"the optimizer's state is of parameter {index}, but there are {len(parameters)} parameters")
    if state.keys() != keys:
        raise ValueError(f"the optimizer's state {index} holds {', '.join(state)}, not {', '.join(sorted(keys))}")
    for key, tensor in state.items():
        shape = torch.Size([]) if key == "step" else parameters[index].shape
        if tensor.shape != shape:
            raise ValueError(f"{key} of the optimizer's state {index} has the shape {list(tensor.shape)}, not {shape}")
        if key == "step" and not 0 <= float(tensor) < MAX_STEPS:
            raise ValueError(f"the step of the optimizer's state {index} cannot be {float(tensor)}")
