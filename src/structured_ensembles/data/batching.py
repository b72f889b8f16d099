"""batches_of(): batches of inputs from arrays, datasets, loaders or splits, to predict from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from structured_ensembles.common.checks import check_whole
from structured_ensembles.common.inputs import Shape, batch_size, is_several, split_batch, tensors_in
from structured_ensembles.data.arrays import as_inputs, stack_samples
from structured_ensembles.data.conversion import check_bytes
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.random_states import iterate_isolated
from structured_ensembles.data.splits import parse_batch


def batches_of(x: Any, size: int, ids: bool = False, shape: Shape | None = None, pixels: bool = False) -> Iterator[Any]:
    """Yield batches of `size` samples, checked and converted by `as_inputs`; a loader decides on its batch size itself.

    ids: inputs are whole numbers. shape: of one sample in training; it tells whether the network takes several inputs.
    pixels: they were uint8 in training, so that other whole numbers are refused.
    """
    check_whole("batch_size", size)
    check = check_bytes if pixels else None
    if isinstance(x, DataLoader):
        for batch in iterate_isolated(x):
            yield as_inputs("x", _without_targets(batch, shape), ids, check)
    elif isinstance(x, Data):
        raise TypeError("x must be inputs or one split, such as data.test, not all of data")
    elif hasattr(x, "batches") and not isinstance(x, Dataset):  # a split of `Data`
        for inputs, _ in x.batches(size):
            yield as_inputs("x", inputs, ids, check)
    else:
        inputs = as_inputs("x", stack_samples("x", x)[0] if isinstance(x, Dataset) else x, ids, check)
        if tensors_in(inputs)[0].dim() == 0 or batch_size(inputs) == 0:
            raise ValueError("x has no samples")
        yield from split_batch(inputs, size)


def _without_targets(batch: Any, shape: Shape | None) -> Any:
    """Return the inputs of a loader's batch: (inputs, targets), a dict with or without "labels", or inputs alone."""
    if not is_several(shape):
        return batch[0] if isinstance(batch, list | tuple) else batch
    if isinstance(batch, Mapping):
        return {name: tensor for name, tensor in batch.items() if name != "labels"}
    with suppress(TypeError):
        inputs, _ = parse_batch(batch)
        if not isinstance(inputs, Tensor):
            return inputs
    return tuple(batch) if isinstance(batch, list) else batch  # a list with one tensor per input
