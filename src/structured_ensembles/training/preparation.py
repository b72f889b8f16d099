"""prepare_training(): check the arguments of a training run before any network changes, and read its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from structured_ensembles.common.checks import check_list, check_seed, check_whole
from structured_ensembles.common.devices import Device, pick_device
from structured_ensembles.common.processes import gather
from structured_ensembles.cuda.capture import ask_for_small_workspaces
from structured_ensembles.data import Data
from structured_ensembles.data.batch_changes import check_mixup
from structured_ensembles.data.losses import Loss, choose_units
from structured_ensembles.data.target_scaling import Units
from structured_ensembles.resuming.folder import RunFile
from structured_ensembles.resuming.identity import Identity, compute_identity
from structured_ensembles.storage.container import check_leaves, raise_as_artifact_error
from structured_ensembles.training.execution import Execution
from structured_ensembles.training.fleet_checkpoint import Checkpoint, load_fleet
from structured_ensembles.training.mesh import Mesh, mesh_for
from structured_ensembles.training.recipe import Recipe
from structured_ensembles.training.teaching import Lessons

MAX_NUMBER = 2**63 - 1  # of a member
GRAPH_DEVICES = {"cuda"}  # where the graph engine may run; tests name the CPU, where a captured step is the step itself


@dataclass(frozen=True)
class PreparedTraining:
    """The checked arguments of a training run, and the checkpoint of an earlier call.

    numbers: of the members. uses_graph: whether a CUDA graph computes the epochs. path, identity: of the checkpoint.
    earlier: the checkpoint that is there already, or None.
    """

    recipe: Recipe
    execution: Execution
    seed: int
    numbers: Sequence[int]
    device: torch.device
    mesh: Mesh
    uses_graph: bool
    path: Path | None
    identity: Identity
    earlier: Checkpoint | None

    def units(self, members: nn.ModuleList, data: Data, loss: Loss | None, known: Units | None) -> Units | None:
        """Return the units in which members learn a regression's targets: the checkpoint's, the known, or new ones."""
        if self.earlier is not None:
            with raise_as_artifact_error(f"checkpoint {self.path} is damaged; delete it to start anew"):
                return Units.from_json(check_leaves(self.earlier[1].get("units"), (int, float), "units"))
        return choose_units(list(members), data, loss) if known is None else known


def prepare_training(
    members: nn.ModuleList,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    device: Device,
    seed: int,
    *,
    numbers: Sequence[int] | None,
    loss: Loss | None,
    loss_name: str | None,
    checkpoint: str | Path | RunFile | None,
    units: Units | None,
    gaussian: bool,
    lessons: Lessons | None = None,
) -> PreparedTraining:
    """Check the arguments of a training run before any network changes, and read its checkpoint if there is one.

    units, gaussian: those of the ensemble before this run. lessons: of a teacher.
    """
    seed = check_seed(seed)
    check_mixup(recipe.mixup, data, loss is not None)
    numbers = _check_numbers(numbers, len(members))
    for name, tensor in (*members.named_parameters(), *members.named_buffers()):
        if tensor.is_inference():
            raise ValueError(
                f"the networks cannot be trained: {name} was made under torch.inference_mode(); make or load them "
                "outside of it"
            )
    for number, network in enumerate(members):
        if recipe.epochs and not any(parameter.requires_grad for parameter in network.parameters()):
            raise ValueError(f"member {number} has no parameter that requires gradients: there is nothing to train")
    run_device = pick_device(device, members)
    mesh = mesh_for(len(members), run_device)
    uses_graph = _uses_graph(execution, run_device, mesh)
    if uses_graph:
        ask_for_small_workspaces()  # before cuBLAS allocates a large one
    settings = {
        "seed": seed,
        "numbers": numbers,
        "units": None if units is None else units.to_json(),
        "gaussian": gaussian,
        **({} if lessons is None or checkpoint is None else {"teacher": lessons.identity()}),
    }
    path, identity = _identify(checkpoint, members, data, recipe, execution, loss, loss_name, settings)
    return PreparedTraining(
        recipe, execution, seed, numbers, run_device, mesh, uses_graph, path, identity, load_fleet(path, identity)
    )


def _uses_graph(execution: Execution, device: torch.device, mesh: Mesh) -> bool:
    """Tell whether a CUDA graph computes the epochs; it cannot where processes exchange gradients in a step."""
    if execution.engine == "graph" and device.type not in GRAPH_DEVICES:
        raise ValueError(f"engine must be 'loop' or 'auto' on {device}: 'graph' is for CUDA devices")
    if execution.engine == "graph" and mesh.data_size > 1:
        raise ValueError(
            "engine must be 'loop' or 'auto' where several processes share a member: a CUDA graph cannot exchange "
            "gradients between them"
        )
    return device.type in GRAPH_DEVICES and execution.engine != "loop" and mesh.data_size == 1


def _check_numbers(numbers: Sequence[int] | None, members: int) -> list[int]:
    """Return the members' numbers, 0, 1, … by default; raise an error unless there is one for each network."""
    if numbers is None:
        return list(range(members))
    check_list("numbers", numbers)
    if len(numbers) != members:
        raise ValueError(f"numbers must hold one for each of the {members} networks, not {list(numbers)!r}")
    for number in numbers:
        check_whole("each of numbers", number, least=0)
        if number > MAX_NUMBER:  # the random generator hashes 64 bits: two members would draw the same
            raise ValueError(f"each of numbers must be at most 2**63 - 1, not {number!r}")
    return [int(number) for number in numbers]


def _identify(
    checkpoint: str | Path | RunFile | None,
    members: nn.ModuleList,
    data: Data,
    recipe: Recipe,
    execution: Execution,
    loss: Loss | None,
    loss_name: str | None,
    settings: Mapping[str, Any],
) -> tuple[Path | None, Identity]:
    """Return the checkpoint's path and the identity of the run, computed here unless a method gave it."""
    if checkpoint is None or isinstance(checkpoint, RunFile):
        return (None, {}) if checkpoint is None else (checkpoint.path, checkpoint.identity)
    # Processes may have drawn different weights: the identity of the first one counts.
    return Path(checkpoint), gather(
        compute_identity(members, data, recipe, execution, loss, loss_name, "checkpoint=", method="train", **settings)
    )[0]
