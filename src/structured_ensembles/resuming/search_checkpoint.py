"""Checkpoint of a search: written after every epoch, so that an interrupted search goes on to the same vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structured_ensembles.common.processes import decided_by_first, gather, rank
from structured_ensembles.resuming.identity import RunFile, check_same
from structured_ensembles.storage.container import ArtifactError, read_container, write_container

FILE = "checkpoint-search.safetensors"  # one of `identity.CHECKPOINTS`
FORM = "structured-ensembles-search"
VERSION = 1


@dataclass(frozen=True)
class SearchState:
    """A search after some epochs.

    changing: every tensor that the next epoch begins with, by name, on the CPU. kept: the vectors and statistics of the
        best epoch so far. best: its validation loss. random: the state of the generators, one tensor per process.
    history: figures of the epochs so far.
    """

    changing: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    best: float
    random: Sequence[Tensor]
    history: Sequence[Mapping[str, float]]


def save_search(file: RunFile, state: SearchState) -> None:
    """Write the state; of several processes, the first one does."""
    if rank() > 0:
        return
    random = {str(index): own for index, own in enumerate(state.random)}
    parts = {"changing": state.changing, "kept": state.kept, "random": random}
    tensors = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    structure = {"identity": file.identity, "best": state.best, "history": list(state.history)}
    write_container(file.path, FORM, VERSION, structure, tensors)


def load_search(file: RunFile) -> SearchState | None:
    """Read the state of this search, as the first process finds it; None if there is none."""
    return decided_by_first(lambda: _read(file) if file.path.exists() else None)


def _read(file: RunFile) -> SearchState:
    structure, tensors = read_container(file.path, FORM, VERSION, "the checkpoint of a search")
    check_same(structure.get("identity"), file.identity, str(file.path))
    try:
        random = _part(tensors, "random.")
        return SearchState(
            _part(tensors, "changing."),
            _part(tensors, "kept."),
            float(structure["best"]),
            [random[str(index)] for index in range(len(random))],
            [dict(row) for row in structure["history"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{file.path} is not the checkpoint of a search ({error}): delete it") from error


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): own.clone() for name, own in tensors.items() if name.startswith(prefix)}


def random_states(device: torch.device) -> list[Tensor]:
    """The state of this device's random generator, in every process."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    states: list[Tensor] = gather(own)
    return states


def set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    """Set this process's generator to where it was."""
    own = states[rank() % len(states)]
    if device.type == "cuda":
        torch.cuda.set_rng_state(own, device)
    else:
        torch.set_rng_state(own)
