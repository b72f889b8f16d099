"""Assembly of data: arrays or loaders to checked splits, names of the classes and the normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from structured_ensembles.common.checks import check_choice, check_list
from structured_ensembles.common.inputs import Inputs, map_inputs
from structured_ensembles.data.arrays import (
    Check,
    as_inputs,
    as_targets,
    check_labels,
    check_largest_label,
    check_pair,
    check_values,
    warn_of_many_classes,
    warn_of_two_values,
)
from structured_ensembles.data.conversion import check_images
from structured_ensembles.data.kinds import Normalizations, normalizations_for
from structured_ensembles.data.loader_checks import check_loader, check_streamed_values
from structured_ensembles.data.normalization import Choice, Normalization, normalization_for
from structured_ensembles.data.random_states import iterate_isolated
from structured_ensembles.data.splits import Split, StreamedSplit, TensorSplit, hold_out, parse_batch

Task = Literal["classification", "regression"]


class Assembled(NamedTuple):
    """Fields of a `Data`, in their order; settled: whether the normalisation is final."""

    task: Task
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split | None
    normalization: Normalization | Normalizations | None
    settled: bool


def assemble_arrays(
    inputs: Any,
    targets: Any,
    test: tuple[Any, Any] | None,
    validation: float | tuple[Any, Any],
    classes: Sequence[str] | int | None,
    task: Task | None,
    seed: int,
    ids: bool,
    normalization: Choice,
    standardize: bool,
) -> Assembled:
    """Check arrays and split them; the arguments are those of `Data.from_arrays`."""
    check_choice("task", task, (*get_args(Task), None))
    check = None if is_chosen(normalization) else check_images
    x, y = as_inputs("inputs", inputs, ids, check), as_targets("targets", targets, task)
    check_pair("inputs", x, "targets", y)
    if task is None and y.is_floating_point():
        check_values(y, classes)
        warn_of_two_values(y)
    if task is None and classes is None:
        warn_of_many_classes(y)
    task = task or ("regression" if y.is_floating_point() else "classification")
    names = _class_names(classes, y) if task == "classification" else ()
    share = float(validation) if isinstance(validation, Real) else 0.0
    if not 0 <= share < 1:
        raise ValueError(f"validation must be a share of at least 0 and less than 1, not {share!r}")

    splits_by_name: dict[str, TensorSplit] = {}
    for split_name, pair in (
        ("test", test),
        ("validation", None if isinstance(validation, Real) else validation),
    ):
        if pair is not None:
            splits_by_name[split_name] = _make_split(split_name, pair, x, task, ids, check)
    if task == "classification":
        check_labels("targets", y, len(names))
        for split_name, split in splits_by_name.items():
            check_labels(f"{split_name} targets", split.targets, len(names))

    kept, held_out = hold_out(y if task == "classification" else torch.zeros(len(y)), share, seed)
    if len(held_out):
        splits_by_name["validation"] = TensorSplit(x, y, held_out)
    moments = _resolve_normalization(normalization, x, ids, kept, standardize)
    splits = TensorSplit(x, y, kept), splits_by_name.get("validation"), splits_by_name.get("test")
    return Assembled(task, names, *splits, moments, _is_settled(normalization, x))


def assemble_loaders(
    train: DataLoader[Any],
    validation: DataLoader[Any] | None,
    test: DataLoader[Any] | None,
    classes: Sequence[str] | int | None,
    ids: bool,
    normalization: Choice,
) -> Assembled:
    """Check loaders by their first batches; the arguments are those of `Data.from_loaders`."""
    check = None if is_chosen(normalization) else check_images
    for label, loader in (("train", train), ("validation", validation), ("test", test)):
        if loader is not None:
            check_loader(label, loader, ids, check)
    inputs, targets = parse_batch(next(iterate_isolated(train)))
    if targets.is_floating_point():
        check_streamed_values(targets, classes)
        task: Task = "regression"
        names: tuple[str, ...] = ()
    else:
        task, known = "classification", classes if classes is not None else getattr(train.dataset, "classes", None)
        if known is None:
            raise ValueError(
                "classes must be given: the names of the classes, or their number; for a regression the loader has "
                "to give floats as targets"
            )
        names = _class_names(known, targets)
        check_labels("targets of train", targets, len(names))
    label_count = len(names) if task == "classification" else None
    held_out, test_split = (
        None if loader is None else StreamedSplit(loader, label_count) for loader in (validation, test)
    )
    moments = _resolve_normalization(normalization, inputs, ids)
    splits = StreamedSplit(train, label_count), held_out, test_split
    return Assembled(task, names, *splits, moments, _is_settled(normalization, inputs))


def _resolve_normalization(
    choice: Choice, inputs: Inputs, ids: bool, rows: Tensor | None = None, standardize: bool = True
) -> Normalization | Normalizations | None:
    """Resolve a choice for stored inputs, one or several; see `normalization_for`."""
    if not isinstance(inputs, Tensor):
        return normalizations_for(choice, inputs, ids, rows, standardize)
    return None if ids else normalization_for(choice, inputs, rows, standardize)


def _unpack_pair(label: str, pair: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a pair; raise a TypeError if it is something else."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        described = f"a {type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else repr(pair)
        raise TypeError(f"{label} must be a pair of arrays (inputs, targets), not {described:.100}")
    return pair[0], pair[1]


def _make_split(label: str, pair: Any, like: Inputs, task: Task, ids: bool, check: Check | None) -> TensorSplit:
    """Convert a pair of arrays to a split, with inputs like those of training."""
    inputs, targets = _unpack_pair(label, pair)
    x, y = as_inputs(f"{label} inputs", inputs, ids, check), as_targets(f"{label} targets", targets, task)
    check_pair(f"{label} inputs", x, f"{label} targets", y)
    described, expected = (
        map_inputs(lambda tensor: f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}", values) for values in (x, like)
    )
    if described != expected:
        raise ValueError(f"{label} inputs must be {expected} each, as those of training, not {described}")
    return TensorSplit(x, y, torch.arange(len(y)))


def _is_settled(normalization: Choice, inputs: Inputs) -> bool:
    """Tell whether the normalisation is final: chosen by the user, or "auto" of several inputs."""
    return is_chosen(normalization) or not isinstance(inputs, Tensor)


def is_chosen(normalization: Choice) -> bool:
    """Tell whether the user chose a normalisation: anything but "auto"."""
    return not (isinstance(normalization, str) and normalization == "auto")


def _class_names(classes: Sequence[str] | int | None, labels: Tensor) -> tuple[str, ...]:
    """Return the names of the classes, numbers where there are no names."""
    if classes is None:
        check_largest_label(labels)
        classes = max(int(labels.max()) + 1, 1)
    if isinstance(classes, int | np.integer):
        return tuple(map(str, range(classes)))
    check_list("classes", classes, "names")
    return tuple(map(str, classes))
