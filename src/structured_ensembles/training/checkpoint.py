"""Checkpoints: one file, written atomically after every epoch, from which training goes on to the same weights.

It is a container with a checksum, as the files of ensembles are. Those of earlier versions have none, and are read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from structured_ensembles.networks.copying import check_fits, unsaved_buffers
from structured_ensembles.storage.container import ArtifactError, checked, read_container, refused, write_container
from structured_ensembles.storage.files import check_regular

FORMAT = "structured-ensembles-checkpoint"
VERSION = 1
SGD, ADAM = {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}  # what optimizers keep of each parameter
MOST_STEPS = 2**53
EARLIER = "state"  # the entry that files of earlier versions have: without a checksum and non-persistent buffers


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write named tensors, what can be written as JSON, and a list of the tensors, so that none can be missing."""
    write_container(path, FORMAT, VERSION, {**state, "tensors": sorted(tensors)}, tensors)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the tensors and the state, checked; None if there is no checkpoint."""
    if not path.exists():
        return None
    try:
        with refused(f"{path} is damaged"):
            check_regular(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if EARLIER in metadata:
                    state = checked(json.loads(metadata[EARLIER]), dict, "its state")
                    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                    return tensors, {**state, "earlier_version": True}
        state, tensors = read_container(path, FORMAT, VERSION, "a checkpoint")
        if state.pop("tensors", None) != sorted(tensors):
            raise ArtifactError(f"{path} does not have the tensors that it lists")
    except ArtifactError as error:
        raise ValueError(f"{path} is not a checkpoint of a training run ({error}): delete it to start anew") from error
    return {name: tensor.clone() for name, tensor in tensors.items()}, state


def is_members(name: str, members: int) -> bool:
    """Tell whether a checkpoint of so many members may have a tensor of this name."""
    number, kind, *_ = [*name.split(".", 2), ""]
    return number.isdecimal() and int(number) < members and kind in ("now", "best", "optimizer")


def check_complete(network: nn.Module, kept: Mapping[str, Tensor], earlier_version: bool) -> None:
    """Raise a ValueError unless `kept` has the state of a network in its shapes; only other buffers may have grown."""
    optional = unsaved_buffers(network)
    if earlier_version and optional:
        raise ValueError(f"an earlier version wrote it, which did not keep the buffer {min(optional)}")
    check_fits(network, kept)


def optimizer_tensors(prefix: str, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state (momentum and the like) as named tensors."""
    found = {}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if value is not None:
                found[f"{prefix}{index}.{key}"] = torch.as_tensor(value)
    return found


def restore_optimizer(prefix: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_tensors` gave; raise a ValueError if it is not of an optimizer like this one."""
    whole = optimizer.state_dict()
    loaded: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            index, _, key = name.removeprefix(prefix).partition(".")
            loaded.setdefault(int(index), {})[key] = tensor
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in loaded.items():
        _check_state(number, state, parameters, SGD if isinstance(optimizer, torch.optim.SGD) else ADAM)
    whole["state"] |= loaded
    optimizer.load_state_dict(whole)
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if value.shape == parameter.shape:  # in the parameter's layout too, as kernels for many tensors want it
                values[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


def _check_state(index: int, state: Mapping[str, Tensor], parameters: Sequence[Tensor], keys: set[str]) -> None:
    """Raise a ValueError unless the state is a parameter's: fused kernels write past the end of what is too short."""
    if not 0 <= index < len(parameters):
        raise ValueError(f"the optimizer's state is of parameter {index}, but there are {len(parameters)} parameters")
    if state.keys() != keys:
        raise ValueError(f"the optimizer's state {index} holds {', '.join(state)}, not {', '.join(sorted(keys))}")
    for key, tensor in state.items():
        shape = torch.Size([]) if key == "step" else parameters[index].shape
        if tensor.shape != shape:
            raise ValueError(f"{key} of the optimizer's state {index} has the shape {list(tensor.shape)}, not {shape}")
        if key == "step" and not 0 <= float(tensor) < MOST_STEPS:
            raise ValueError(f"the step of the optimizer's state {index} cannot be {float(tensor)}")
