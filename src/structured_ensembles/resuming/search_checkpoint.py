"""Checkpoint of a search: written after every epoch, so that an interrupted search resumes to the same vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.checks import check_path
from structured_ensembles.common.processes import decide_in_first_process, gather, rank
from structured_ensembles.data import Data
from structured_ensembles.resuming.folder import RunFile
from structured_ensembles.resuming.identity import check_same, digest_data, identify_loss, to_plain_json
from structured_ensembles.storage.container import ArtifactError, read_container, write_container
from structured_ensembles.storage.fingerprints import digest_module

FILE = "checkpoint-search.safetensors"  # one of `folder.CHECKPOINTS`
FORM = "structured-ensembles-search"
VERSION = 1
Snapshot = tuple[dict[str, Tensor], dict[str, Tensor]]  # vectors, and the network's buffers


@dataclass(frozen=True)
class SearchState:
    """State of a search after some epochs.

    changing: every tensor that the next epoch begins with, by name. kept: the vectors and statistics of the best epoch
        so far. best: its validation loss. random: the states of the generators, one tensor per process.
    history: figures of the epochs so far.
    """

    changing: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    best: float
    random: Sequence[Tensor]
    history: Sequence[Mapping[str, float]]


def identify_search(
    checkpoint: str | Path | RunFile | None, model: nn.Module, data: Data, loss: Any, **settings: Any
) -> RunFile | None:
    """Return the checkpoint with the identity of its search, computed here unless a method gave it."""
    if checkpoint is None or isinstance(checkpoint, RunFile):
        return checkpoint
    path = check_path("checkpoint", checkpoint)
    loss_identity = identify_loss(loss, None, "checkpoint=", "leave checkpoint= out")  # there is no loss_name= here
    described = {"loss": loss_identity, **digest_module(model), **digest_data(data)}
    # Processes may have drawn different weights: the identity of the first one counts.
    identity = gather({"method": "learn_scales", **to_plain_json(settings), **described})[0]
    return RunFile(path, identity)


def save_search(file: RunFile, state: SearchState) -> None:
    """Write a checkpoint; of several processes, the first does."""
    if rank() > 0:
        return
    random = {str(index): generator_state for index, generator_state in enumerate(state.random)}
    sections = {"changing": state.changing, "kept": state.kept, "random": random}
    tensors = {f"{prefix}.{name}": tensor for prefix, section in sections.items() for name, tensor in section.items()}
    structure = {"identity": file.identity, "best": state.best, "history": list(state.history)}
    write_container(file.path, FORM, VERSION, structure, tensors)


def load_search(file: RunFile) -> SearchState | None:
    """Read the checkpoint of this search in the first process; None in all of them if there is none."""
    return decide_in_first_process(lambda: _read(file) if file.path.exists() else None)


def _read(file: RunFile) -> SearchState:
    """Read and check a checkpoint."""
    structure, tensors = read_container(file.path, FORM, VERSION, "the checkpoint of a search")
    check_same(structure.get("identity"), file.identity, str(file.path))
    try:
        random = _section(tensors, "random.")
        return SearchState(
            _section(tensors, "changing."),
            _section(tensors, "kept."),
            float(structure["best"]),
            [random[str(index)] for index in range(len(random))],
            [dict(row) for row in structure["history"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{file.path} is not the checkpoint of a search ({error}): delete it") from error


def _section(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Copy the tensors whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor.clone() for name, tensor in tensors.items() if name.startswith(prefix)}


def gather_random_states(device: torch.device) -> list[Tensor]:
    """Collect the states of the device's random generator in all processes."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    states: list[Tensor] = gather(state)
    return states


def set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    """Restore the state of this process's random generator."""
    state = states[rank() % len(states)]
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def join_snapshot(snapshot: Snapshot) -> dict[str, Tensor]:
    """Merge a snapshot into one dict for the checkpoint."""
    learned, statistics = snapshot
    buffers = {f"statistics.{name}": value for name, value in statistics.items()}
    return {f"vectors.{name}": value for name, value in learned.items()} | buffers


def split_snapshot(joined: Mapping[str, Tensor], like: Snapshot) -> Snapshot:
    """Undo `join_snapshot`, in the order of the snapshot `like`, since a file does not keep the order."""
    check_like(joined, join_snapshot(like))
    like_vectors, like_statistics = like
    vectors = {name: joined[f"vectors.{name}"] for name in like_vectors}
    return vectors, {name: joined[f"statistics.{name}"] for name in like_statistics}


def check_like(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless a checkpoint has exactly the tensors of this search, in their shapes and types."""
    for name in sorted({*tensors, *expected}):
        if name not in tensors or name not in expected:
            raise ValueError(f"{name} is missing, or unknown")
        tensor, reference = tensors[name], expected[name]
        if tensor.shape != reference.shape or tensor.dtype != reference.dtype or tensor.isnan().any():
            raise ValueError(f"{name} has another shape or type, or NaN")
        if name.endswith(".step") and not 0 <= float(tensor) < 2**53:
            raise ValueError(f"{name} cannot be {float(tensor)}")
