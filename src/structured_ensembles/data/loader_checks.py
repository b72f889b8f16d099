"""Check of a DataLoader before any work: its length, and its first batch."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from structured_ensembles.data.arrays import Check, as_inputs, as_targets, is_one_hot
from structured_ensembles.data.random_states import iterate_isolated
from structured_ensembles.data.splits import parse_batch


def check_loader(label: str, loader: DataLoader[Any], ids: bool, check: Check | None) -> None:
    """Check that a loader knows its length, and check its first batch; the others are checked when they are used."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(
            f"{label} must be a DataLoader, not a dataset: Data.from_datasets takes {type(loader).__name__}"
        )
    try:
        batches = len(loader)
        len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, AttributeError) as error:  # other loaders than torch's will do
        raise TypeError(
            f"{label} must be a DataLoader that knows how many batches and samples it has: {error}"
        ) from error
    if batches == 0:
        raise ValueError(f"{label} is empty")
    batch = next(iterate_isolated(loader), None)
    try:
        inputs, targets = parse_batch(batch)
    except TypeError as error:
        raise TypeError(
            f'{label} must give batches (inputs, targets) of tensors, or dicts of inputs and "labels", but its first '
            f"batch is {error}. Several inputs come in a tuple or a dict, as in ((a, b), targets)"
        ) from error
    as_inputs(f"inputs of {label}", inputs, ids, check)
    as_targets(f"targets of {label}", targets, None)


def check_streamed_values(targets: Tensor, classes: Any) -> None:
    """Raise a ValueError, or warn, if the first float targets (batch, …) of a loader seem to be classes."""
    if classes is not None:
        raise ValueError(
            "targets of train are floats, which make it a regression, but there are classes: for a classification let "
            "the loader give whole numbers (of one-hot rows targets.argmax(1)), for a regression leave classes out"
        )
    if is_one_hot(targets):
        warnings.warn(
            f"targets of train {tuple(targets.shape)} seem to be one-hot labels, with a single 1 in each row, but "
            f"floats make it a regression of {targets.shape[1]} values: for a classification let the loader give "
            "targets.argmax(1), and say the classes",
            stacklevel=4,
        )
