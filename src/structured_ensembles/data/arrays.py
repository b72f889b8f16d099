"""Arrays that users bring, as tensors; with an error that names whatever is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.common.inputs import Inputs, each, tensors_in
from structured_ensembles.data.conversion import as_float32, as_tensor
from structured_ensembles.data.kinds import stored
from structured_ensembles.data.random_states import kept_states

Check = Callable[[str, Tensor], None]  # of an argument's name and value
# Whole numbers look like values of a regression if they would be more classes than this, …
MANY_CLASSES = 100
FEW_SAMPLES = 10  # … with fewer samples than this for each, on average
MOST_CLASSES = 100_000  # that are taken from the largest label, unless there are more samples


def as_inputs(argument: str, values: Any, ids: bool = False, check: Check | None = None) -> Inputs:
    """Convert inputs: uint8 stays uint8 (pixels), other numbers become float32, or int64 if they are `ids`.

    A tuple of arrays, or a dict, are several inputs: each is kept as `kinds.stored` says.
    check: called with a single input as it was given, such as `check_images`.
    """
    if _are_several(values):
        named: Mapping[Any, Any] = values if isinstance(values, Mapping) else dict(enumerate(values))
        if not named:
            raise ValueError(f"{argument} must hold at least one input, not none")
        found = {name: _stored(f"{argument}[{name!r}]", own, ids) for name, own in named.items()}
        return found if isinstance(values, Mapping) else tuple(found.values())
    tensor = as_tensor(argument, values)
    if ids and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise TypeError(f"{argument} must be whole numbers, as they are ids, not {tensor.dtype}")
    if ids:
        return tensor.long()
    if check is not None:
        check(argument, tensor)
    return tensor if tensor.dtype == torch.uint8 else as_float32(argument, tensor)


def _stored(argument: str, values: Any, ids: bool) -> Tensor:
    tensor = as_tensor(argument, values)
    return as_float32(argument, tensor) if tensor.is_floating_point() else stored(tensor, ids)


def as_targets(argument: str, values: Any, task: str | None) -> Tensor:
    """Labels (samples,) as int64 or values as float32: by their type, unless the task is given."""
    tensor = as_tensor(argument, values)
    if task == "regression" or (task is None and tensor.is_floating_point()):
        return as_float32(argument, tensor)
    if tensor.is_floating_point():
        as_float32(argument, tensor)  # or an error
        if not torch.equal(tensor, tensor.round()) or (tensor.abs() >= 2**63).any():
            raise ValueError(f"{argument} must be whole numbers for a classification")
    return tensor.squeeze(-1).long() if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor.long()


def _are_several(values: Any) -> bool:
    """Tell several inputs (a dict, or a tuple of arrays or pictures) from one array (also nested lists of numbers)."""
    pictured = isinstance(values, tuple) and any(
        isinstance(own, Image.Image) or getattr(own, "ndim", 0) >= 1 for own in values
    )
    return isinstance(values, Mapping) or pictured


def check_pair(first: str, inputs: Inputs, second: str, targets: Tensor) -> None:
    if not isinstance(inputs, Tensor):
        for own in tensors_in(inputs):
            if own.dim() < 1 or len(own) != len(targets) or len(own) == 0:
                raise ValueError(
                    f"each of {first} must have the shape (samples, …), with as many samples as {second} "
                    f"({len(targets)}), not {tuple(own.shape)}"
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
    if labels.dim() != 1:
        raise ValueError(f"{argument} must have the shape (samples,), not {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"{argument} must be labels from 0 to {classes - 1}, but reach from {low} to {high}")


def check_largest_label(targets: Tensor) -> None:
    """Raise if the largest label (samples,) would make more classes than there can be, with a name for each."""
    classes = int(targets.max()) + 1
    if classes > max(MOST_CLASSES, len(targets)):
        raise ValueError(
            f"targets reach to {classes - 1:,}, which would be {classes:,} classes for {len(targets):,} samples: "
            "number the classes from 0 on, as numpy.unique(targets, return_inverse=True)[1] does, or say how many "
            "there are with classes=; if targets are values, say task='regression'"
        )


def warn_of_many_classes(targets: Tensor) -> None:
    """Warn if targets (samples,) that would be labels look like the values of a regression."""
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
            stacklevel=3,
        )


def stack_samples(argument: str, dataset: Any) -> tuple[Inputs, Tensor]:
    """Read a map-style dataset of (input, target) into tensors; an input may be a tuple or a dict of several."""
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise ValueError(f"{argument} must be a map-style dataset with at least one sample")
    with kept_states():  # a transform may draw
        pairs = [_pair_of(argument, index, dataset[index]) for index in range(len(dataset))]
    inputs, targets = zip(*pairs, strict=True)
    try:
        return each(lambda *own: _stacked(argument, own), *inputs), torch.stack(targets)
    except (KeyError, AttributeError, TypeError) as error:
        raise TypeError(f"{argument} has inputs of different structures: {error}") from error


def _pair_of(argument: str, index: int, given: Any) -> tuple[Inputs, Tensor]:
    """Convert one sample of a dataset."""
    try:
        sample, target = labelled(given) if isinstance(given, Mapping) else given
        return each(_sample_tensor, _structured(sample)), _sample_array(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{argument}[{index}] must be a pair (input, target) of numbers, arrays or images, the input possibly "
            f"a tuple or a dict of several: {error}"
        ) from error


def labelled(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Split a dict, such as tokenizers' collators give, into inputs and "labels"."""
    if "labels" not in batch or len(batch) == 1:
        raise TypeError(f'a dict with only {", ".join(map(repr, batch))}, without "labels" or without inputs')
    return {name: own for name, own in batch.items() if name != "labels"}, batch["labels"]


def _structured(sample: Any) -> Any:
    if not _are_several(sample):
        return _sample_array(sample) if isinstance(sample, tuple) else sample
    return dict(sample) if isinstance(sample, Mapping) else sample


def _sample_tensor(sample: Any) -> Tensor:
    return image_tensor(sample) if isinstance(sample, Image.Image) else _sample_array(sample)


def _sample_array(sample: Any) -> Tensor:
    """Convert an array, a tensor or a number of any shape."""
    plain = isinstance(sample, int | float | np.number | np.bool_)
    return torch.as_tensor(sample) if plain else as_tensor("it", sample).reshape(np.shape(sample))


def _stacked(argument: str, samples: tuple[Tensor, ...]) -> Tensor:
    shapes = {tuple(item.shape) for item in samples}
    if len(shapes) > 1:
        raise ValueError(
            f"{argument} has inputs of different shapes, such as {sorted(shapes)[0]} and {sorted(shapes)[-1]}"
        )
    return torch.stack(samples)


def image_tensor(image: Image.Image) -> Tensor:
    """Pixels of a picture, uint8 (channels, height, width); one channel if it is grey, else three.

    Grey pictures of 16 bits become floats in [0,1], those of floats or 32 bits floats as they are.
    """
    if image.mode.startswith("I;16"):
        return torch.from_numpy(np.array(image).astype(np.float32)[None] / 65535)
    if image.mode in ("I", "F"):
        return torch.from_numpy(np.array(image).astype(np.float32)[None])
    grey = image.mode in ("1", "L", "LA")
    pixels = np.array(image.convert("L" if grey else "RGB"))
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
