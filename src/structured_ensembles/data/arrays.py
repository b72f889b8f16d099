"""Conversion of users' arrays and samples to tensors, with errors that name the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, map_inputs, tensors_in
from structured_ensembles.data.conversion import as_float32, as_tensor
from structured_ensembles.data.kinds import cast_for_storage
from structured_ensembles.data.random_states import preserve_random_states

Check = Callable[[str, Tensor], None]  # takes an argument's name and value, and raises if it is invalid
# Whole numbers look like values of a regression if they would be more classes than this, …
MANY_CLASSES = 100
FEW_SAMPLES = 10  # … with fewer samples than this for each, on average
MAX_CLASSES = 100_000  # inferred from the largest label, unless there are more samples
RENUMBER = "number the classes from 0 on, as numpy.unique(targets, return_inverse=True)[1] does"


def as_inputs(argument: str, values: Any, ids: bool = False, check: Check | None = None) -> Inputs:
    """Convert inputs: uint8 stays uint8 (pixels), other numbers become float32, or int64 if they are `ids`.

    A tuple of arrays, or a dict, are several inputs: each is cast by `kinds.cast_for_storage`.
    check: called with a single input as it was given, such as `check_images`.
    """
    if _are_several(values):
        by_name: Mapping[Any, Any] = values if isinstance(values, Mapping) else dict(enumerate(values))
        if not by_name:
            raise ValueError(f"{argument} must hold at least one input, but is empty")
        tensors = {name: _convert_one(f"{argument}[{name!r}]", value, ids) for name, value in by_name.items()}
        return tensors if isinstance(values, Mapping) else tuple(tensors.values())
    tensor = as_tensor(argument, values)
    if ids and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(f"{argument} must be whole numbers, as they are ids, not {tensor.dtype}")
    if ids:
        return tensor.long()
    if check is not None:
        check(argument, tensor)
    return tensor if tensor.dtype == torch.uint8 else as_float32(argument, tensor)


def _convert_one(argument: str, values: Any, ids: bool) -> Tensor:
    """Convert one of several inputs."""
    tensor = as_tensor(argument, values)
    return as_float32(argument, tensor) if tensor.is_floating_point() else cast_for_storage(tensor, ids)


def as_targets(argument: str, values: Any, task: str | None) -> Tensor:
    """Convert labels (samples,) to int64, values to float32; their type tells which, unless there is a task."""
    tensor = as_tensor(argument, values)
    if task == "regression" or (task is None and tensor.is_floating_point()):
        return as_float32(argument, tensor)
    if tensor.is_floating_point():
        as_float32(argument, tensor)  # raises unless all are finite
        if not torch.equal(tensor, tensor.round()) or (tensor.abs() >= 2**63).any():
            raise ValueError(f"{argument} must be whole numbers for a classification")
    return tensor.squeeze(-1).long() if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor.long()


def _are_several(values: Any) -> bool:
    """Tell whether values are several inputs (a dict, or a tuple of arrays or images) rather than one array."""
    is_tuple_of_inputs = isinstance(values, tuple) and any(
        isinstance(value, Image.Image) or getattr(value, "ndim", 0) >= 1 for value in values
    )
    return isinstance(values, Mapping) or is_tuple_of_inputs


def check_pair(first: str, inputs: Inputs, second: str, targets: Tensor) -> None:
    """Raise a ValueError unless inputs and targets have equally many samples, at least one."""
    if not isinstance(inputs, Tensor):
        for tensor in tensors_in(inputs):
            if tensor.dim() < 1 or len(tensor) != len(targets) or len(tensor) == 0:
                raise ValueError(
                    f"each of {first} must have the shape (samples, …), with as many samples as {second} "
                    f"({len(targets)}), not {tuple(tensor.shape)}"
                )
        return
    if inputs.dim() < 2 or len(inputs) == 0:
        raise ValueError(
            f"{first} must have the shape (samples, …) with at least one sample, not {tuple(inputs.shape)}"
        )
    if targets.dim() == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"{first} and {second} must have equally many samples, not {len(inputs)} and {tuple(targets.shape)}"
        )


def check_labels(argument: str, labels: Tensor, classes: int) -> None:
    """Raise a ValueError unless labels are (samples,), from 0 to classes - 1."""
    if labels.dim() != 1:
        raise ValueError(
            f"{argument} must have the shape (samples,), one label each, not {tuple(labels.shape)}: of one-hot labels "
            "give targets.argmax(1); several labels for a sample, or one for each pixel or token, are not supported"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        hint = f": {RENUMBER}" if low < 0 else ""
        raise ValueError(f"{argument} must be labels from 0 to {classes - 1}, but reach from {low} to {high}{hint}")


def check_largest_label(targets: Tensor) -> None:
    """Raise a ValueError if the largest of the labels (samples,) implies an implausible number of classes."""
    classes = int(targets.max()) + 1
    if classes > max(MAX_CLASSES, len(targets)):
        raise ValueError(
            f"targets reach to {classes - 1:,}, which would be {classes:,} classes for {len(targets):,} samples: "
            f"{RENUMBER}, or say how many there are with classes=; if targets are values, say task='regression'"
        )


def check_values(targets: Tensor, classes: Any) -> None:
    """Raise a ValueError if float targets, which make it a regression unless there is a `task`, seem to be classes."""
    if classes is not None:
        raise ValueError(
            "targets are floats, which make it a regression, but there are classes: for a classification give whole "
            "numbers (of one-hot rows targets.argmax(1)), for a regression say task='regression'"
        )
    if is_one_hot(targets):
        raise ValueError(
            f"targets {tuple(targets.shape)} seem to be one-hot labels, with a single 1 in each row, but floats make "
            f"it a regression of {targets.shape[1]} values: for a classification give targets.argmax(1), for a "
            "regression say task='regression'"
        )


def is_one_hot(targets: Tensor) -> bool:
    """Tell whether each row of targets (samples, values) has a single 1 beside zeros."""
    if targets.dim() != 2 or targets.shape[1] < 2 or not len(targets):
        return False
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())


def warn_of_two_values(targets: Tensor) -> None:
    """Warn if the values (samples,) or (samples, 1) of a regression are 0 and 1 only, as labels are."""
    if targets.numel() == len(targets) and targets.unique().tolist() == [0, 1]:
        warnings.warn(
            "targets are floats, which make it a regression, but only 0 and 1 occur: if they are labels, say "
            "task='classification'; if they are values, task='regression'",
            stacklevel=4,
        )


def warn_of_many_classes(targets: Tensor) -> None:
    """Warn if whole-number targets (samples,) look like the values of a regression."""
    if targets.is_floating_point() or targets.numel() == 0:
        return
    classes = int(targets.max()) + 1
    present = len(targets.unique())
    few = len(targets) < FEW_SAMPLES * classes
    if classes > MANY_CLASSES and (few or present < classes / 2):
        reason = f"there are only {len(targets):,} samples" if few else f"only {present:,} of them occur"
        warnings.warn(
            f"targets are whole numbers up to {classes - 1:,}, so they are taken for {classes:,} classes, though "
            f"{reason}: if they are values, say task='regression'; if they are labels, task='classification'",
            stacklevel=4,
        )


def stack_samples(argument: str, dataset: Any) -> tuple[Inputs, Tensor]:
    """Read a map-style dataset of (input, target) into tensors; an input may be a tuple or a dict of several."""
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{argument} must be a map-style dataset, with samples by number, not {type(dataset).__name__}: "
            "Data.from_loaders takes a DataLoader"
        )
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise ValueError(f"{argument} must be a map-style dataset with at least one sample")
    with preserve_random_states():  # a transform may draw
        pairs = [_convert_pair(argument, index, dataset[index]) for index in range(len(dataset))]
    inputs, targets = zip(*pairs, strict=True)
    try:
        return map_inputs(lambda *samples: _stack(argument, samples), *inputs), torch.stack(targets)
    except (KeyError, AttributeError, TypeError) as error:
        raise TypeError(f"{argument} has inputs of different structures: {error}") from error


def _convert_pair(argument: str, index: int, item: Any) -> tuple[Inputs, Tensor]:
    """Convert one item of a dataset to an input and a target."""
    try:
        sample, target = split_labels(item) if isinstance(item, Mapping) else item
        return map_inputs(_convert_sample, _as_structure(sample)), _convert_array(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{argument}[{index}] must be a pair (input, target) of numbers, arrays or images, the input possibly "
            f"a tuple or a dict of several: {error}"
        ) from error


def split_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Split a dict, such as tokenizers' collators return, into inputs and "labels"."""
    if "labels" not in batch or len(batch) == 1:
        raise TypeError(f'a dict of {", ".join(map(repr, batch))}: its targets must be named "labels", beside inputs')
    return {name: tensor for name, tensor in batch.items() if name != "labels"}, batch["labels"]


def _as_structure(sample: Any) -> Any:
    """Return an input as an array, a tuple of several or a dict."""
    if not _are_several(sample):
        return _convert_array(sample) if isinstance(sample, tuple) else sample
    return dict(sample) if isinstance(sample, Mapping) else sample


def _convert_sample(sample: Any) -> Tensor:
    """Convert an image, an array or a number."""
    return convert_image(sample) if isinstance(sample, Image.Image) else _convert_array(sample)


def _convert_array(sample: Any) -> Tensor:
    """Convert an array, a tensor or a number of any shape."""
    plain = isinstance(sample, int | float | np.number | np.bool_)
    return torch.as_tensor(sample) if plain else as_tensor("it", sample).reshape(np.shape(sample))


def _stack(argument: str, samples: tuple[Tensor, ...]) -> Tensor:
    """Stack samples; raise a ValueError if their shapes differ."""
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) > 1:
        raise ValueError(
            f"{argument} has inputs of different shapes, such as {sorted(shapes)[0]} and {sorted(shapes)[-1]}"
        )
    return torch.stack(samples)


def convert_image(image: Image.Image) -> Tensor:
    """Convert an image to uint8 pixels (channels, height, width); one channel if it is grey, else three.

    Grey images of 16 bits become floats in [0,1]; those of floats or 32 bits become floats of the same values.
    """
    if image.mode.startswith("I;16"):
        return torch.from_numpy(np.array(image).astype(np.float32)[None] / 65535)
    if image.mode in ("I", "F"):
        return torch.from_numpy(np.array(image).astype(np.float32)[None])
    grey = image.mode in ("1", "L", "LA")
    pixels = np.array(image.convert("L" if grey else "RGB"))
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
