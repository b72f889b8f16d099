"""Held-out samples: read them, and gather outputs and targets in one pass over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structured_ensembles.common.inputs import Inputs
from structured_ensembles.common.plurals import counted
from structured_ensembles.data import Data, Split
from structured_ensembles.data.arrays import as_inputs, as_targets, check_pair
from structured_ensembles.data.assembly import Task
from structured_ensembles.data.conversion import check_bytes
from structured_ensembles.data.dataset import SplitName, check_data
from structured_ensembles.data.splits import TensorSplit

HeldOut = Data | tuple[Any, Any]  # data with a split to calibrate on, or a pair of arrays: inputs and targets


def read_held_out(data: HeldOut, name: SplitName, task: Task, ids: bool, pixels: bool) -> Split:
    """Return a split of data, which must be for this task; or read a pair of arrays (samples, …) as one.

    ids, pixels: whether the inputs of a pair are ids, or uint8 pixels.
    """
    if isinstance(data, tuple):
        return _read_pair(data, task, ids, pixels)
    check_data_for(data, task)
    return data.split(name)


def check_labels(outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError if there is a label that outputs (members, samples, classes) have no value for."""
    if len(targets) and not targets.is_floating_point() and int(targets.max()) >= outputs.shape[-1]:
        raise ValueError(
            f"data have labels up to {int(targets.max())}, but the ensemble has "
            f"{counted(outputs.shape[-1], 'output')}: they are not for the same classes"
        )


def check_data_for(data: Any, task: Task) -> None:
    """Raise an error unless data are a `Data` for the task of an ensemble."""
    check_data(data)
    if data.task != task:
        raise ValueError(f"data are for {data.task}, but the ensemble is for {task}: Ensemble(…, task={data.task!r})")


def _read_pair(pair: tuple[Any, Any], task: Task, ids: bool, pixels: bool) -> TensorSplit:
    """Convert and check a pair of arrays."""
    if len(pair) != 2:
        raise ValueError(f"data must be a Data or a pair (inputs, targets), not a tuple of {len(pair)}")
    inputs = as_inputs("inputs", pair[0], ids, check_bytes if pixels else None)
    targets = as_targets("targets", pair[1], task)
    check_pair("inputs", inputs, "targets", targets)
    return TensorSplit(inputs, targets, torch.arange(len(targets)))


def gather_outputs(
    predict: Callable[[Inputs, Tensor, int], Tensor], split: Split, batch_size: int = 512
) -> tuple[Tensor, Tensor]:
    """Return outputs (members, samples, …) and targets (samples, …), in the same order, on the CPU.

    predict: returns outputs (members, batch, …) for inputs (batch, …), targets and the number of the first sample.
    One pass, because a streamed split may come in another order the next time.
    """
    outputs, truth, done = torch.empty(0), torch.empty(0), 0
    for inputs, targets in split.batches(batch_size):
        batch_outputs = predict(inputs, targets, done)
        if done + len(targets) > len(truth):
            # Allocate for all samples at once: small tensors kept between large batches would fragment memory. A loader
            # may give more samples than its data set has, hence the growth.
            capacity = max(len(split), done + len(targets), 2 * done)
            larger_outputs = batch_outputs.new_empty(len(batch_outputs), capacity, *batch_outputs.shape[2:])
            larger_truth = torch.empty(capacity, *targets.shape[1:], dtype=targets.dtype)
            if done:
                larger_outputs[:, :done], larger_truth[:done] = outputs[:, :done], truth[:done]
            outputs, truth = larger_outputs, larger_truth
        outputs[:, done : done + len(targets)], truth[done : done + len(targets)] = batch_outputs, targets.cpu()
        done += len(targets)
    return outputs[:, :done], truth[:done]
