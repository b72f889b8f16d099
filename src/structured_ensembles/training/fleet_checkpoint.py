"""The checkpoint of a fleet: every member's weights, best weights, optimizer state and standing, and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.processes import rank
from structured_ensembles.networks.state import all_tensors
from structured_ensembles.resuming.identity import Identity, check_same
from structured_ensembles.storage.container import check_field, check_list_field, raise_as_artifact_error
from structured_ensembles.training.averaging import restore_average
from structured_ensembles.training.checkpoint import (
    check_complete,
    is_member_tensor,
    load_checkpoint,
    save_checkpoint,
)
from structured_ensembles.training.engine import Member
from structured_ensembles.training.history import History
from structured_ensembles.training.mesh import Mesh, gather_tensors
from structured_ensembles.training.optimizers import OptimizerState
from structured_ensembles.training.state_copies import restore_state

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]  # named tensors, and the state that is written as JSON


def save_fleet(
    path: Path, fleet: Sequence[Member], history: History, next_epoch: int, run: Mapping[str, Any], mesh: Mesh
) -> None:
    """Gather the members of all processes and write the checkpoint. run: its identity and units."""
    tensors: dict[str, Tensor] = {}
    for number, member in enumerate(fleet):
        if rank() != mesh.source(number):
            continue
        tensors |= {f"{number}.now.{name}": tensor for name, tensor in all_tensors(member.network).items()}
        tensors |= {f"{number}.best.{name}": tensor for name, tensor in member.best.items()}
        tensors |= {f"{number}.average.{name}": tensor for name, tensor in member.average.items()}
        state = member.optimizer_state.tensors()
        tensors |= {f"{number}.optimizer.{name}": tensor for name, tensor in state.items()}
    all_members = gather_tensors(tensors)
    if all_members is not None:
        standings = [standing_of(member) for member in fleet]
        engines = {"engines": history.engines, "fallbacks": history.fallbacks}
        save_checkpoint(
            path, all_members, {**run, "epoch": next_epoch, "members": standings, "rows": history.rows, **engines}
        )


def load_fleet(path: Path | None, identity: Identity) -> Checkpoint | None:
    """Read the checkpoint, and check that this run wrote it; return None if there is none."""
    checkpoint = None if path is None else load_checkpoint(path)
    if checkpoint is not None:
        check_same(checkpoint[1].get("identity"), identity, f"checkpoint {path}")
    return checkpoint


def resume_fleet(checkpoint: Checkpoint | None, fleet: Sequence[Member], path: Path | None) -> tuple[History, int]:
    """Load a checkpoint into the members; return the history so far and the next epoch."""
    if checkpoint is None:
        return History(), 0
    tensors, state = checkpoint
    with raise_as_artifact_error(f"checkpoint {path} does not fit the networks (delete it to start anew)"):
        history = History.restore(state["rows"], state.get("engines", []), state.get("fallbacks", []))
        epoch = check_field(state["epoch"], int, "epoch")
        standings = check_list_field(state["members"], dict, "members")
        if epoch != history.epochs or epoch < 1:
            raise ValueError(f"it goes on with epoch {epoch}, which does not follow the last one of its history")
        unknown = {name for name in tensors if not is_member_tensor(name, len(fleet))}
        if unknown:
            raise ValueError(f"it has {min(unknown)}")
        for number, (member, standing) in enumerate(zip(fleet, standings, strict=True)):
            device = next(member.network.parameters()).device
            now, best = (_select(tensors, f"{number}.{role}.", device) for role in ("now", "best"))
            for state_copy in (now, best):
                check_complete(member.network, state_copy, bool(state.get("earlier_version")))
            set_standing(member, standing)
            restore_state(member.network, best if member.stopped else now)  # those of a diverged member may be NaN
            member.best = best
            restore_average(member.average, _select(tensors, f"{number}.average.", device))
            member.optimizer_state = OptimizerState(_select(tensors, f"{number}.optimizer.", device))
            if member.stopped:
                history.stopped[number] = member.stopped
    return history, epoch


def standing_of(member: Member) -> dict[str, Any]:
    """Return a member's best score and epochs as JSON holds them; the keys are part of the file format."""
    return {
        "score": member.best_score,
        "epoch": member.best_epoch,
        "rise": member.last_improvement,
        "stopped": member.stopped,
    }


def set_standing(member: Member, standing: Mapping[str, Any]) -> None:
    """Set what `standing_of` returned; raise an error if a checkpoint has another type."""
    member.best_score = float(check_field(standing["score"], (int, float), "a member's score"))
    member.best_epoch = check_field(standing["epoch"], int, "a member's best epoch")
    member.last_improvement = check_field(standing["rise"], int, "a member's last epoch that was better")
    member.stopped = check_field(standing["stopped"], (str, type(None)), "why a member stopped")


def _select(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names, on a device."""
    return {name.removeprefix(prefix): tensor.to(device) for name, tensor in tensors.items() if name.startswith(prefix)}
