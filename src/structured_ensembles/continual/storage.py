"""One file for a learner: backbone, masks, heads and the JSON that rebuilds it; it can go on learning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from structured_ensembles.container import ArtifactError, build_named, named_network, read_container, write_container
from structured_ensembles.continual.heads import new_head, num_features
from structured_ensembles.continual.learner import Learned, Learner
from structured_ensembles.copying import copy_with
from structured_ensembles.data import Normalization
from structured_ensembles.devices import Device
from structured_ensembles.origin import warn_if_unnamed
from structured_ensembles.shrinking import set_sizes

FORMAT = "structured-ensembles-learner"
VERSION = 2  # of files with normalised columns; others are written as 1, which earlier versions read
Kind = TypeVar("Kind", bound=Learner)


def save(learner: Learner, path: str | Path) -> int:
    """Write the learner; returns the size of the file in bytes."""
    warn_if_unnamed(learner.backbone, "backbone")
    own, details = learner._state()
    tensors = {f"backbone.{name}": tensor for name, tensor in learner.backbone.state_dict().items()}
    for number, head in learner.heads.items():
        tensors |= {f"heads.{number}.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors |= {f"own.{name}": tensor for name, tensor in own.items()}
    structure = {
        "method": learner.method,
        "settings": learner.settings,
        "model": named_network(learner.backbone),
        "tasks": [_described(number, known) for number, known in learner.learned.items()],
        "details": details,
        "torch": torch.__version__,
    }
    stored = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    columns = any(known.normalization and len(known.shape) != 3 for known in learner.learned.values())
    return write_container(path, FORMAT, 2 if columns else 1, structure, stored)


def load(
    path: str | Path,
    backbone: nn.Module | None = None,
    trust_code: bool = False,
    device: Device = "auto",
    kind: type[Kind] = Learner,  # type: ignore[assignment]
) -> Kind:
    """Read a learner.

    backbone: one such as the learner was made with, if the file does not name one of the zoo; it is not changed.
    trust_code: let the file name a function of an installed package that makes the backbone, and call it.
    kind: the class that the learner must have.
    """
    from structured_ensembles.continual import LEARNERS

    path = Path(path)
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    method = LEARNERS.get(structure["method"])
    if method is None or not issubclass(method, kind):
        raise ArtifactError(f"{path} holds a learner of the method {structure['method']!r}, not a {kind.__name__}")
    with torch.random.fork_rng(devices=[]):
        base = build_named(path, structure["model"], trust_code, "backbone") if backbone is None else backbone
    learner = method(base, device=device, **structure["settings"])
    _fill(path, learner, structure, tensors)
    return learner


def resume(learner: Learner, path: Path) -> None:
    """Bring a learner that has learned nothing yet to where the file is; it must be of the same method and settings."""
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    if structure["method"] != learner.method or structure["settings"] != learner.settings:
        raise ArtifactError(f"{path} holds a learner with another method or other settings")
    _fill(path, learner, structure, tensors)


def _fill(path: Path, learner: Learner, structure: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    try:
        weights = _named(tensors, "backbone.")
        learner.backbone.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
        learner.backbone.load_state_dict(weights)
        features = 0
        for row in structure["tasks"]:
            number, known = row["number"], _learned(row)
            if not features:
                features = num_features(learner.backbone, learner._example(known.shape))
            whole = new_head(learner.head, features, len(known.names), seed=0)
            own = _named(tensors, f"heads.{number}.")
            learner.heads[number] = _of_size(whole, own).to(learner.device).eval()
            learner.learned[number] = known
        learner._restore(_named(tensors, "own."), structure["details"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path} does not fit the backbone: {error}") from error


def _of_size(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The module with these tensors in it, whatever their sizes."""
    filled = copy_with(module, lambda name, _: tensors[name], lambda name, _: tensors[name])
    for part in filled.modules():
        set_sizes(part)
    return filled


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _described(number: int, known: Learned) -> dict[str, Any]:
    normalization = None if known.normalization is None else known.normalization.to_json()
    return {**vars(known), "normalization": normalization, "number": number}


def _learned(row: Mapping[str, Any]) -> Learned:
    return Learned(
        classes=tuple(row["classes"]),
        names=tuple(row["names"]),
        shape=tuple(row["shape"]),
        normalization=Normalization.from_json(row["normalization"]),
        losses=tuple(row["losses"]),
        pixels=bool(row.get("pixels", False)),  # files of earlier versions do not say
    )
