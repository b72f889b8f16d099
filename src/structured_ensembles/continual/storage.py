"""One file for a learner: backbone, masks, heads and the JSON that rebuilds it; it can go on learning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import Device
from structured_ensembles.continual.heads import HeadKind, new_head, num_features
from structured_ensembles.continual.learned import Learned
from structured_ensembles.data import Normalization
from structured_ensembles.networks.copying import all_tensors, check_fits, copy_with, fill, unsaved_buffers
from structured_ensembles.networks.provenance import warn_if_unnamed
from structured_ensembles.networks.resizing import set_sizes
from structured_ensembles.storage.container import (
    ArtifactError,
    build_named,
    checked,
    checked_leaves,
    checked_list,
    named_network,
    read_container,
    refused,
    write_container,
)

FORMAT = "structured-ensembles-learner"
# 3 for files with non-persistent buffers, 2 with normalised columns; others are written as 1, which earlier versions
# read.
VERSION = 3
MOST_VALUES = 2**22  # of one input, for which a file alone is believed: the backbone is run on two such inputs


class StoredLearner(Protocol):
    """The attributes of a `Learner` that its file keeps, and the methods that restore it."""

    method: ClassVar[str]
    head: HeadKind
    device: torch.device
    backbone: nn.Module
    heads: dict[int, nn.Module]
    learned: dict[int, Learned]
    settings: dict[str, Any]

    def network(self, task: int) -> nn.Module: ...
    def _example(self, shape: tuple[int, ...]) -> Tensor: ...
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def _restore(self, tensors: Mapping[str, Tensor], details: Mapping[str, Any]) -> None: ...


Made = TypeVar("Made", bound=StoredLearner)


def save(learner: StoredLearner, path: str | Path) -> int:
    """Write the learner; returns the size of the file in bytes."""
    warn_if_unnamed(learner.backbone, "backbone")
    own, details = learner._state()
    tensors = {f"backbone.{name}": tensor for name, tensor in all_tensors(learner.backbone).items()}
    for number, head in learner.heads.items():
        tensors |= {f"heads.{number}.{name}": tensor for name, tensor in all_tensors(head).items()}
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
    version = 3 if unsaved_buffers(learner.backbone) else 2 if columns else 1
    return write_container(path, FORMAT, version, structure, stored)


def load(
    path: str | Path,
    methods: Mapping[str, Callable[..., Made]],
    kind: str,
    backbone: nn.Module | None = None,
    trust_code: bool = False,
    device: Device = "auto",
) -> Made:
    """Read a learner.

    methods: makes a learner of each kind that it may be, by the name in the file. kind: what they all are, in a word.
    backbone: one such as the learner was made with, if the file does not name one of the zoo; it is not changed.
    trust_code: let the file name a function of an installed package that makes the backbone, and call it.
    """
    path = Path(path)
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    with refused(f"{path} does not say what learner it holds"):
        name = checked(structure["method"], str, "method")
        settings = checked(structure["settings"], dict, "settings")
    method = methods.get(name)
    if method is None:
        raise ArtifactError(f"{path} holds a learner of the method {name!r}, not a {kind}")
    base = _backbone(path, structure, tensors, trust_code) if backbone is None else backbone
    with refused(f"{path} has settings that are not of a learner"):
        learner = method(base, device=device, **settings)
    _fill(path, learner, structure, tensors, math.inf if backbone is not None else MOST_VALUES)
    return learner


def resume(learner: StoredLearner, path: Path, most_values: float) -> None:
    """Bring a learner that has learned nothing yet to where the file is; it must be of the same method and settings.

    most_values: how many one input of its tasks has.
    """
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    if structure.get("method") != learner.method or structure.get("settings") != learner.settings:
        raise ArtifactError(f"{path} holds a learner with another method or other settings")
    _fill(path, learner, structure, tensors, most_values)


def _backbone(path: Path, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], trust_code: bool) -> nn.Module:
    """Build the backbone that the file names; the zoo's only once its sizes are known to be those of the tensors."""
    named = structure.get("model")
    with torch.random.fork_rng(devices=[]):
        if isinstance(named, dict) and ":" not in str(named.get("name")):
            with torch.device("meta"):
                outline = build_named(path, named, trust_code, "backbone", tensors=len(tensors))
            with refused(f"{path} does not fit the backbone"):
                check_fits(outline, _named(tensors, "backbone."))
        return build_named(path, named, trust_code, "backbone", tensors=len(tensors))


def _fill(
    path: Path, learner: StoredLearner, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], most_values: float
) -> None:
    """Put what the file holds into a learner. most_values: how many one input may have."""
    with refused(f"{path} does not fit the backbone"):
        weights = _named(tensors, "backbone.")
        learner.backbone.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
        if broken := sorted(name for name, tensor in tensors.items() if tensor.isnan().any()):
            raise ValueError(f"{broken[0]} has NaN")  # no learner was saved so: training stops with an error
        check_fits(learner.backbone, weights)
        if lost := unsaved_buffers(learner.backbone) - weights.keys():
            warnings.warn(
                f"{path} was written by an earlier version, which did not keep the non-persistent buffers "
                f"{', '.join(sorted(lost))}: those of the backbone stay. What it predicts may differ",
                stacklevel=4,
            )
        fill(learner.backbone, weights)
        tasks = [_learned(row) for row in checked_list(structure["tasks"], dict, "tasks")]
        if len(dict(tasks)) != len(tasks):
            raise ValueError("it has two tasks of the same number")
        strangers = {name for name in tensors if not _belongs(name, dict(tasks))}
        if strangers:
            raise ValueError(f"{min(strangers)} belongs to none of its tasks")
        for number, known in tasks:
            if math.prod(known.shape) > most_values:
                raise ValueError(
                    f"its inputs have {math.prod(known.shape):,} values each; pass the backbone as backbone= if that "
                    "is right"
                )
            if not learner.learned:
                num_features(learner.backbone, learner._example(known.shape))  # whether it takes such inputs
            learner.heads[number] = _head(learner, len(known.names), _named(tensors, f"heads.{number}."))
            learner.learned[number] = known
        learner._restore(_named(tensors, "own."), checked(structure["details"], dict, "details"))
        for number, known in tasks:
            _check_runs(learner.network(number), known, learner._example(known.shape))


@torch.no_grad()
def _check_runs(network: nn.Module, known: Learned, example: Tensor) -> None:
    """Raise an error unless the network of a task takes its inputs, as they are normalised, and knows its classes."""
    inputs = example if known.normalization is None else known.normalization(example)
    outputs = network(inputs)
    if outputs.shape != (len(example), len(known.names)):
        raise ValueError(f"the network of a task gives {list(outputs.shape)} for {len(known.names)} classes")


def _head(learner: StoredLearner, classes: int, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a head with these tensors in it; it may be narrower than the backbone."""
    with torch.device("meta"):
        outline = new_head(learner.head, 1, classes, seed=0)
    expected, found = all_tensors(outline), dict(tensors)
    if {name: own.dim() for name, own in expected.items()} != {name: own.dim() for name, own in found.items()}:
        raise ValueError(f"a head has the tensors {', '.join(found)[:200]}, not {', '.join(expected)}")
    last = list(expected)[-1]
    if len(found[last]) != classes:
        raise ValueError(f"a head has {len(found[last])} outputs for {classes} classes")
    return _of_size(outline, found).to(learner.device).eval()


def _belongs(name: str, tasks: Mapping[int, Learned]) -> bool:
    """Tell whether a tensor of this name is of the backbone, of a method or of the head of a known task."""
    kind, _, rest = name.partition(".")
    return kind in ("backbone", "own") or (kind == "heads" and rest.partition(".")[0] in set(map(str, tasks)))


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


def _learned(row: Mapping[str, Any]) -> tuple[int, Learned]:
    """Read what is known of a task, and its number."""
    classes, names = checked_list(row["classes"], int, "classes"), checked_list(row["names"], str, "names")
    shape, number = checked_list(row["shape"], int, "shape"), checked(row["number"], int, "number")
    if len(classes) != len(names) or not names or not shape or min(*shape, 1) < 1 or number < 0:
        raise ValueError(f"a task has {len(classes)} classes, {len(names)} names, inputs of {shape}, number {number}")
    checked_leaves(row["normalization"], (int, float), "normalization")
    return number, Learned(
        classes=tuple(classes),
        names=tuple(names),
        shape=tuple(shape),
        normalization=Normalization.from_json(row["normalization"]),
        losses=tuple(checked_list(row["losses"], (int, float), "losses")),
        pixels=checked(row.get("pixels", False), bool, "pixels"),  # files of earlier versions do not say
    )
