"""The file of a learner: backbone, masks, heads and the JSON that rebuilds it, ready for further tasks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import Device
from structured_ensembles.continual.heads import HeadKind, count_features, create_head
from structured_ensembles.continual.learned import Learned
from structured_ensembles.data import Normalization
from structured_ensembles.networks.copying import copy_with
from structured_ensembles.networks.provenance import warn_if_unnamed
from structured_ensembles.networks.resizing import set_sizes
from structured_ensembles.networks.state import all_tensors, check_fits, fill, unsaved_buffers
from structured_ensembles.storage.container import (
    ArtifactError,
    build_from_json,
    check_field,
    check_leaves,
    check_list_field,
    origin_to_json,
    raise_as_artifact_error,
    read_container,
    write_container,
)

FORMAT = "structured-ensembles-learner"
# 3 for files with non-persistent buffers, 2 with normalised columns; others are written as 1, which earlier versions
# read.
VERSION = 3
MAX_VALUES = 2**22  # of one input, if only the file says so: the backbone is run on two such inputs


class StoredLearner(Protocol):
    """Attributes of a `Learner` that its file keeps, and the methods that restore it."""

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


AnyLearner = TypeVar("AnyLearner", bound=StoredLearner)


def save(learner: StoredLearner, path: str | Path) -> int:
    """Write the learner; return the size of the file in bytes."""
    warn_if_unnamed(learner.backbone, "backbone")
    method_tensors, details = learner._state()
    tensors = {f"backbone.{name}": tensor for name, tensor in all_tensors(learner.backbone).items()}
    for number, head in learner.heads.items():
        tensors |= {f"heads.{number}.{name}": tensor for name, tensor in all_tensors(head).items()}
    tensors |= {f"own.{name}": tensor for name, tensor in method_tensors.items()}
    structure = {
        "method": learner.method,
        "settings": learner.settings,
        "model": origin_to_json(learner.backbone),
        "tasks": [_describe(number, task) for number, task in learner.learned.items()],
        "details": details,
        "torch": torch.__version__,
    }
    stored = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    columns = any(task.normalization and len(task.shape) != 3 for task in learner.learned.values())
    version = 3 if unsaved_buffers(learner.backbone) else 2 if columns else 1
    return write_container(path, FORMAT, version, structure, stored)


def load(
    path: str | Path,
    methods: Mapping[str, Callable[..., AnyLearner]],
    expected: str,
    backbone: nn.Module | None = None,
    trust_code: bool = False,
    device: Device = "auto",
) -> AnyLearner:
    """Read a learner from its file.

    methods: the constructors of the possible learners, by the name in the file. expected: the class that they all are.
    backbone: one of the learner's architecture, needed if the file does not name one of the zoo; it is not changed.
    trust_code: let the file name a function of an installed package that builds the backbone, and call it.
    """
    path = Path(path)
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    with raise_as_artifact_error(f"{path} does not say what learner it holds"):
        name = check_field(structure["method"], str, "method")
        settings = check_field(structure["settings"], dict, "settings")
    method = methods.get(name)
    if method is None:
        raise ArtifactError(
            f"{path} holds a learner of the method {name!r}, not of one that {expected}.load knows "
            f"({', '.join(methods)}): load it with its own class"
        )
    base = _build_backbone(path, structure, tensors, trust_code) if backbone is None else backbone
    with raise_as_artifact_error(f"{path} has settings that are not of a learner"):
        learner = method(base, device=device, **settings)
    _fill(path, learner, structure, tensors, math.inf if backbone is not None else MAX_VALUES)
    return learner


def resume(learner: StoredLearner, path: Path, max_values: float) -> None:
    """Restore the file's state in a new learner, which must be of the same method and settings.

    max_values: the number of values of one input of its tasks.
    """
    structure, tensors = read_container(path, FORMAT, VERSION, "a continual learner")
    if structure.get("method") != learner.method or structure.get("settings") != learner.settings:
        raise ArtifactError(f"{path} holds a learner with another method or other settings")
    _fill(path, learner, structure, tensors, max_values)


def _build_backbone(
    path: Path, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], trust_code: bool
) -> nn.Module:
    """Build the backbone that the file names; one of the zoo only after its sizes were compared with the tensors."""
    model = structure.get("model")
    with torch.random.fork_rng(devices=[]):
        if isinstance(model, dict) and ":" not in str(model.get("name")):
            with torch.device("meta"):
                outline = build_from_json(path, model, trust_code, "backbone", tensors=len(tensors))
            with raise_as_artifact_error(f"{path} does not fit the backbone"):
                check_fits(outline, _with_prefix(tensors, "backbone."))
        return build_from_json(path, model, trust_code, "backbone", tensors=len(tensors))


def _fill(
    path: Path, learner: StoredLearner, structure: Mapping[str, Any], tensors: Mapping[str, Tensor], max_values: float
) -> None:
    """Restore tensors and tasks of the file in a learner. max_values: how many values one input may have."""
    with raise_as_artifact_error(f"{path} does not fit the backbone"):
        weights = _with_prefix(tensors, "backbone.")
        learner.backbone.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
        if broken := sorted(name for name, tensor in tensors.items() if tensor.isnan().any()):
            raise ValueError(f"{broken[0]} has NaN")  # never saved so: training raises an error
        check_fits(learner.backbone, weights)
        if lost := unsaved_buffers(learner.backbone) - weights.keys():
            warnings.warn(
                f"{path} was written by an earlier version, which did not keep the non-persistent buffers "
                f"{', '.join(sorted(lost))}: those of the backbone stay, and predictions may differ",
                stacklevel=4,
            )
        fill(learner.backbone, weights)
        tasks = [_read_task(row) for row in check_list_field(structure["tasks"], dict, "tasks")]
        if len(dict(tasks)) != len(tasks):
            raise ValueError("it has two tasks of the same number")
        unknown = {name for name in tensors if not _belongs(name, dict(tasks))}
        if unknown:
            raise ValueError(f"{min(unknown)} belongs to none of its tasks")
        for number, task in tasks:
            if math.prod(task.shape) > max_values:
                raise ValueError(
                    f"its inputs have {math.prod(task.shape):,} values each; pass the backbone as backbone= if that "
                    "is right"
                )
            if not learner.learned:
                count_features(learner.backbone, learner._example(task.shape))  # raises unless it takes such inputs
            learner.heads[number] = _build_head(learner, len(task.names), _with_prefix(tensors, f"heads.{number}."))
            learner.learned[number] = task
        learner._restore(_with_prefix(tensors, "own."), check_field(structure["details"], dict, "details"))
        for number, task in tasks:
            _check_runs(learner.network(number), task, learner._example(task.shape))


@torch.no_grad()
def _check_runs(network: nn.Module, task: Learned, example: Tensor) -> None:
    """Raise an error unless the network of a task takes its normalised inputs and returns a logit per class."""
    inputs = example if task.normalization is None else task.normalization(example)
    outputs = network(inputs)
    if outputs.shape != (len(example), len(task.names)):
        raise ValueError(f"the network of a task gives {list(outputs.shape)} for {len(task.names)} classes")


def _build_head(learner: StoredLearner, classes: int, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Build a head from its tensors; it may be narrower than the backbone."""
    with torch.device("meta"):
        outline = create_head(learner.head, 1, classes, seed=0)
    expected = {name: tensor.dim() for name, tensor in all_tensors(outline).items()}
    if expected != {name: tensor.dim() for name, tensor in tensors.items()}:
        raise ValueError(f"a head has the tensors {', '.join(tensors)[:200]}, not {', '.join(expected)}")
    last = list(expected)[-1]
    if len(tensors[last]) != classes:
        raise ValueError(f"a head has {len(tensors[last])} outputs for {classes} classes")
    return _fill_and_resize(outline, tensors).to(learner.device).eval()


def _belongs(name: str, tasks: Mapping[int, Learned]) -> bool:
    """Tell whether a tensor of this name is of the backbone, of a method or of the head of a known task."""
    family, _, rest = name.partition(".")
    return family in ("backbone", "own") or (family == "heads" and rest.partition(".")[0] in set(map(str, tasks)))


def _fill_and_resize(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the module with these tensors, resized to them."""
    filled = copy_with(module, lambda name, _: tensors[name], lambda name, _: tensors[name])
    for submodule in filled.modules():
        set_sizes(submodule)
    return filled


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors whose names have a prefix, and remove it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _describe(number: int, task: Learned) -> dict[str, Any]:
    """Describe a learned task for JSON."""
    normalization = None if task.normalization is None else task.normalization.to_json()
    return {**vars(task), "normalization": normalization, "number": number}


def _read_task(row: Mapping[str, Any]) -> tuple[int, Learned]:
    """Read the number and the description of a task from JSON."""
    classes, names = check_list_field(row["classes"], int, "classes"), check_list_field(row["names"], str, "names")
    shape, number = check_list_field(row["shape"], int, "shape"), check_field(row["number"], int, "number")
    if len(classes) != len(names) or not names or not shape or min(*shape, 1) < 1 or number < 0:
        raise ValueError(f"a task has {len(classes)} classes, {len(names)} names, inputs of {shape}, number {number}")
    check_leaves(row["normalization"], (int, float), "normalization")
    return number, Learned(
        classes=tuple(classes),
        names=tuple(names),
        shape=tuple(shape),
        normalization=Normalization.from_json(row["normalization"]),
        losses=tuple(check_list_field(row["losses"], (int, float), "losses")),
        pixels=check_field(row.get("pixels", False), bool, "pixels"),  # files of earlier versions do not say
    )
