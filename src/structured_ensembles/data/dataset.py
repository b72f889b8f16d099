"""Data: inputs and targets as tensors, their splits, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.data.splits import hold_out

Task = Literal["classification", "regression"]
SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """Some samples of stored tensors: inputs (stored, …), targets (stored, …), and which of them, shape (samples,)."""

    inputs: Tensor
    targets: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Data:
    """A data set for one task, made by `from_arrays` or `load_data`.

    Pixels are stored as uint8 and handed out as floats in [0,1], normalised with the channels' mean and deviation;
    other inputs are handed out as they are.
    """

    task: Task
    classes: tuple[str, ...]  # their names; empty for regression
    train: Split
    validation: Split | None
    test: Split | None
    mean: tuple[float, ...] | None = None
    deviation: tuple[float, ...] | None = None
    name: str = "arrays"
    _moments: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        targets: Any,
        *,
        test: tuple[Any, Any] | None = None,
        validation: float | tuple[Any, Any] = 0.1,
        classes: Sequence[str] | int | None = None,
        task: Task | None = None,
        seed: int = 0,
        name: str = "arrays",
    ) -> Data:
        """Arrays or tensors: inputs (samples, …) and targets (samples,), or (samples, values) for regression.

        inputs: uint8 arrays are pixels, (samples, channels, height, width) if they are images; floats are taken as they
            are.
        targets: whole numbers are class labels, floats make it a regression, unless `task` says otherwise.
        validation: the share of the training samples to hold out, drawn with `seed` and, for classification, the same
            share of every class; or a pair of arrays.
        classes: names of the classes, or their number; by default as many as the labels say.
        """
        x, y = _tensor("inputs", inputs), _tensor("targets", targets)
        task = task or ("regression" if y.is_floating_point() else "classification")
        y = _as_targets(y, task)
        _check_pair("inputs", x, "targets", y)
        names = _class_names(classes, y) if task == "classification" else ()
        given = {}
        for label, pair in (
            ("test", test),
            ("validation", None if isinstance(validation, float | int) else validation),
        ):
            if pair is not None:
                own_x, own_y = (
                    _tensor(f"{label} inputs", pair[0]),
                    _as_targets(_tensor(f"{label} targets", pair[1]), task),
                )
                _check_pair(f"{label} inputs", own_x, f"{label} targets", own_y)
                if own_x.shape[1:] != x.shape[1:] or own_x.dtype != x.dtype:
                    raise ValueError(
                        f"{label} inputs are {own_x.dtype} of shape {tuple(own_x.shape[1:])} each, "
                        f"but the training inputs {x.dtype} of shape {tuple(x.shape[1:])}"
                    )
                given[label] = Split(own_x, own_y, torch.arange(len(own_x)))
        for label, labels in (("targets", y), *((f"{key} targets", split.targets) for key, split in given.items())):
            if task == "classification":
                _check_labels(label, labels, len(names))
        kept, held_out = torch.arange(len(x)), None
        if isinstance(validation, float | int):
            if not 0 <= validation < 1:
                raise ValueError(f"validation must be a share of at least 0 and less than 1, not {validation!r}")
            kept, held_out = hold_out(y if task == "classification" else torch.zeros(len(y)), validation, seed)
        mean, deviation = _moments_of(x) if x.dtype == torch.uint8 and x.dim() == 4 else (None, None)
        own_validation = given.get("validation")
        if held_out is not None and len(held_out):
            own_validation = Split(x, y, held_out)
        return cls(task, names, Split(x, y, kept), own_validation, given.get("test"), mean, deviation, name)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.train.inputs.shape[1:])

    def example(self, batch: int = 2) -> Tensor:
        """A batch as a model gets it, shape (batch, …), such as `trace` wants."""
        rows = torch.arange(batch) % len(self.train)
        return self.prepare(self.train.inputs[self.train.index[rows]])

    def split(self, name: SplitName) -> Split:
        found: Split | None = getattr(self, name)
        if found is None:
            raise ValueError(f"data has no {name} split")
        return found

    def num_batches(self, split: SplitName, size: int) -> int:
        return -(-len(self.split(split)) // size)

    def batches(
        self,
        split: SplitName,
        size: int,
        *,
        seed: int | tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of prepared inputs (size, …) and targets, shuffled if there is a `seed`; the last may be smaller."""
        own = self.split(split)
        order = own.index
        if seed is not None:
            order = order[torch.from_numpy(np.random.default_rng(seed).permutation(len(order)))]
        for rows in order.split(size):
            targets = own.targets[rows].to(device)
            yield (
                self.prepare(own.inputs[rows].to(device), dtype),
                targets.to(dtype) if targets.is_floating_point() else targets,
            )

    def prepare(self, inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored inputs as a model gets them: pixels become floats in [0,1] and are normalised."""
        if inputs.dtype != torch.uint8:
            return inputs.to(dtype)
        pixels = inputs.to(dtype) / 255
        if self.mean is None or self.deviation is None:
            return pixels
        key = (inputs.device, dtype)
        if key not in self._moments:
            mean, deviation = (
                torch.tensor(value, device=inputs.device, dtype=dtype) for value in (self.mean, self.deviation)
            )
            self._moments[key] = mean[:, None, None], deviation[:, None, None]
        mean, deviation = self._moments[key]
        return (pixels - mean) / deviation


def _tensor(argument: str, values: Any) -> Tensor:
    try:
        tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    except TypeError as error:
        raise TypeError(f"{argument} must be numbers, as an array or a tensor: {error}") from error
    if tensor.is_complex():
        raise TypeError(f"{argument} must be real numbers, not {tensor.dtype}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{argument} contain values that are not finite")
    if argument.endswith("inputs") and tensor.dtype != torch.uint8:
        return tensor.float()
    return tensor


def _as_targets(targets: Tensor, task: Task) -> Tensor:
    if task == "regression":
        return targets.float()
    if targets.is_floating_point() and not torch.equal(targets, targets.round()):
        raise ValueError("targets must be whole numbers for a classification")
    return targets.squeeze(-1).long() if targets.dim() == 2 and targets.shape[1] == 1 else targets.long()


def _check_pair(first: str, inputs: Tensor, second: str, targets: Tensor) -> None:
    if inputs.dim() < 2 or len(inputs) == 0:
        raise ValueError(
            f"{first} must have the shape (samples, …) with at least one sample, not {tuple(inputs.shape)}"
        )
    if targets.dim() == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"{first} and {second} must have equally many samples, not {len(inputs)} and {tuple(targets.shape)}"
        )


def _class_names(classes: Sequence[str] | int | None, labels: Tensor) -> tuple[str, ...]:
    if classes is None:
        classes = max(int(labels.max()) + 1, 1)
    return tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(map(str, classes))


def _check_labels(argument: str, labels: Tensor, classes: int) -> None:
    if labels.dim() != 1:
        raise ValueError(f"{argument} must have the shape (samples,), not {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"{argument} must be labels from 0 to {classes - 1}, but reach from {low} to {high}")


def _moments_of(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the pixels of each channel, in [0,1]; in pieces, to spare memory."""
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for piece in images.split(4096):
        pixels = piece.double() / 255
        total += pixels.sum((0, 2, 3))
        squares += pixels.square().sum((0, 2, 3))
    count = images.numel() / images.shape[1]
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(1e-12).sqrt()
    return tuple(mean.tolist()), tuple(deviation.tolist())
