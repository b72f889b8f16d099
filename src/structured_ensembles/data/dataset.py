"""Data: a training, a validation and a test split for one task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from structured_ensembles.checks import check_choice, check_type
from structured_ensembles.data.arrays import as_inputs, as_targets, check_labels, check_pair, stack_samples
from structured_ensembles.data.drawing import Seed
from structured_ensembles.data.kinds import Kind, Kinds, kinds_of
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.data.splits import Batch, Split, StreamedSplit, TensorSplit, as_batch, hold_out
from structured_ensembles.several import Inputs, Shape, batch_size, each, rows_of, tensors_in

Task = Literal["classification", "regression"]
SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True, repr=False)
class Data:
    """A data set for one task; made by `from_arrays`, `from_datasets`, `from_loaders` or `load_data`.

    Pixels are stored as uint8 and reach a network as floats in [0,1], normalised; other inputs as floats, as they are;
    ids, such as those of tokens, as whole numbers. A network of several inputs gets a tuple as positional arguments, a
    dict as keyword arguments, each input as its type says: see `from_arrays`.
    """

    task: Task
    classes: tuple[str, ...]  # their names; empty for regression
    train: Split
    validation: Split | None
    test: Split | None
    normalization: Normalization | None = None
    name: str = "arrays"
    ids: bool = False

    def __repr__(self) -> str:
        what = f"{self.num_classes} classes" if self.classes else self.task
        named = {name: getattr(self, name) for name in ("train", "validation", "test")}
        splits = ", ".join(f"{name}: {split}" for name, split in named.items() if split is not None)
        return f"Data({self.name}, {what}, {splits})"

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
        ids: bool = False,
    ) -> Data:
        """Arrays or tensors: inputs (samples, …) and targets (samples,), or (samples, values) for regression.

        inputs: uint8 arrays are pixels, (samples, channels, height, width) if they are images; floats are taken as
            they are. A tuple or a dict of arrays are the inputs of a network that takes several: of these, whole
            numbers (ids) and booleans (masks) stay such.
        targets: whole numbers are class labels, floats make it a regression, unless `task` says otherwise.
        validation: the share of the training samples to hold out, drawn with `seed` and, for classification, the same
            share of every class; or a pair of arrays.
        classes: names of the classes, or their number; by default as many as the labels say.
        ids: inputs are indices, such as those of tokens for an embedding, and stay whole numbers.
        """
        x, y = as_inputs("inputs", inputs, ids), as_targets("targets", targets, task)
        task = task or ("regression" if y.is_floating_point() else "classification")
        check_pair("inputs", x, "targets", y)
        names = _class_names(classes, y) if task == "classification" else ()
        share = validation if isinstance(validation, float | int) else 0.0
        if not 0 <= share < 1:
            raise ValueError(f"validation must be a share of at least 0 and less than 1, not {share!r}")

        given: dict[str, TensorSplit] = {}
        for label, pair in (
            ("test", test),
            ("validation", None if isinstance(validation, float | int) else validation),
        ):
            if pair is not None:
                given[label] = _given_split(label, pair, x, task, ids)
        if task == "classification":
            check_labels("targets", y, len(names))
            for label, split in given.items():
                check_labels(f"{label} targets", split.targets, len(names))

        kept, held_out = hold_out(y if task == "classification" else torch.zeros(len(y)), share, seed)
        if len(held_out):
            given["validation"] = TensorSplit(x, y, held_out)
        normalization = _normalization_of(x, ids)
        splits = TensorSplit(x, y, kept), given.get("validation"), given.get("test")
        return cls(task, names, *splits, normalization, name, ids)

    @classmethod
    def from_datasets(
        cls,
        train: Dataset[Any],
        *,
        test: Dataset[Any] | None = None,
        validation: float | Dataset[Any] = 0.1,
        classes: Sequence[str] | int | None = None,
        task: Task | None = None,
        seed: int = 0,
        name: str = "datasets",
        ids: bool = False,
    ) -> Data:
        """Map-style datasets of (input, target): images, arrays or tensors. They are read once, into memory.

        An input may be a tuple or a dict of several; a dict with "labels" is an input and its target.
        Images (PIL, or uint8 arrays) become pixels (channels, height, width); random transforms would be frozen, so
        leave augmentation to the recipe. The other arguments are those of `from_arrays`.
        """
        if classes is None:
            classes = getattr(train, "classes", None)
        held_out = validation if isinstance(validation, float | int) else stack_samples("validation", validation)
        return cls.from_arrays(
            *stack_samples("train", train),
            test=None if test is None else stack_samples("test", test),
            validation=held_out,
            classes=classes,
            task=task,
            seed=seed,
            name=name,
            ids=ids,
        )

    @classmethod
    def from_loaders(
        cls,
        train: DataLoader[Any],
        *,
        validation: DataLoader[Any] | None = None,
        test: DataLoader[Any] | None = None,
        classes: Sequence[str] | int | None = None,
        normalization: Normalization | None = None,
        name: str = "loaders",
        ids: bool = False,
    ) -> Data:
        """DataLoaders of (inputs, targets), streamed: for data that do not fit in memory.

        Batch size, order, augmentation are the loaders' own. `classes` may be left out for regression (float targets),
        and where the loader's dataset has an attribute `classes`. Inputs may be a tuple or dict of tensors; a dict with
        "labels" is inputs and targets.
        """
        for label, loader in (("train", train), ("validation", validation), ("test", test)):
            if loader is not None:
                _check_loader(label, loader)
        _, targets = as_batch(next(iter(train)))
        if targets.is_floating_point():
            task: Task = "regression"
            names: tuple[str, ...] = ()
        else:
            task, known = "classification", classes if classes is not None else getattr(train.dataset, "classes", None)
            if known is None:
                raise ValueError("classes must be given: the names of the classes, or their number")
            names = _class_names(known, targets)
            check_labels("targets of train", targets, len(names))
        held_out, tested = (None if loader is None else StreamedSplit(loader) for loader in (validation, test))
        return cls(task, names, StreamedSplit(train), held_out, tested, normalization, name, ids)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> Any:
        """The shape of one input; of several, a tuple or dict of shapes."""
        shape: Shape = each(lambda own: tuple(own.shape[1:]), self.example(1))
        return shape

    @property
    def kinds(self) -> Kinds | None:
        """What each of several inputs holds; None for one input."""
        return kinds_of(next(iter(self.train.batches(1)))[0], self.ids)

    def example(self, batch: int = 2, dtype: torch.dtype = torch.float32) -> Any:
        """A batch as a network gets it, shape (batch, …), such as `trace` wants; a tuple or dict of several inputs."""
        inputs, _ = next(iter(self.train.batches(batch)))
        return self.prepare(rows_of(inputs, torch.arange(batch) % batch_size(inputs)), dtype)

    def split(self, name: SplitName) -> Split:
        check_choice("split", name, get_args(SplitName))
        found: Split | None = getattr(self, name)
        if found is None:
            raise ValueError(f"data has no {name} split")
        return found

    def batches(
        self,
        split: SplitName,
        size: int,
        *,
        seed: Seed | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Batch]:
        """Batches as a network gets them: inputs (size, …) prepared, targets; shuffled if there is a `seed`."""
        for inputs, targets in self.split(split).batches(size, seed, device):
            yield self.prepare(inputs, dtype), targets.to(dtype) if targets.is_floating_point() else targets

    def num_batches(self, split: SplitName, size: int) -> int:
        return self.split(split).num_batches(size)

    def prepare(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Any:
        """Stored inputs as a network gets them: pixels become floats in [0,1] and are normalised."""
        return prepared(inputs, dtype, self.normalization, self.ids)

    def to(self, device: torch.device | str) -> Data:
        """The same data with its tensors on a device (streamed splits stay where they are)."""
        splits = {label: getattr(self, label) for label in ("train", "validation", "test")}
        return replace(self, **{label: split.to(device) for label, split in splits.items() if split is not None})


def prepared(
    inputs: Inputs, dtype: torch.dtype, normalization: Normalization | None, ids: bool, kinds: Kinds | None = None
) -> Any:
    """Stored inputs as a network gets them. kinds: of several inputs, if they were trained on as others."""
    if not isinstance(inputs, Tensor):

        def one_of_several(own: Tensor, kind: Kind) -> Any:
            if kind == "mask":
                return own.bool()
            images = kind == "pixels" and own.dim() == 4
            return prepared(own, dtype, normalization if images else None, kind == "whole numbers")

        return each(one_of_several, inputs, kinds or kinds_of(inputs, ids))
    if ids:
        return inputs.long()
    floats = as_floats(inputs, dtype)
    return floats if normalization is None else normalization(floats)


def as_floats(inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pixels as floats in [0,1]; floats as they are. Stored in the order of the axes, as a network's `view` expects."""
    plain = inputs.contiguous()
    if 1 in inputs.shape:  # such an axis may have any stride: a convolution could take grey images for channels last
        plain = plain.flatten().view(inputs.shape)
    return plain.to(dtype) / 255 if inputs.dtype == torch.uint8 else plain.to(dtype)


def _normalization_of(inputs: Inputs, ids: bool) -> Normalization | None:
    """Of uint8 images (samples, channels, height, width). Several inputs with as many channels share the first's."""
    images = [own for own in tensors_in(inputs) if own.dtype == torch.uint8 and own.dim() == 4 and not ids]
    channels = {own.shape[1] for own in images}
    if len(channels) > 1:
        raise ValueError(
            f"inputs have images of {' and '.join(map(str, sorted(channels)))} channels, which cannot share a "
            "normalisation: give floats, normalised"
        )
    return Normalization.of(images[0]) if images else None


def _given_split(label: str, pair: Iterable[Any], like: Inputs, task: Task, ids: bool) -> TensorSplit:
    inputs, targets = pair
    x, y = as_inputs(f"{label} inputs", inputs, ids), as_targets(f"{label} targets", targets, task)
    check_pair(f"{label} inputs", x, f"{label} targets", y)
    given, expected = (each(lambda own: f"{own.dtype} of shape {tuple(own.shape[1:])}", part) for part in (x, like))
    if given != expected:
        raise ValueError(f"{label} inputs are {given} each, but the training inputs {expected}")
    return TensorSplit(x, y, torch.arange(len(y)))


def check_data(data: Any, argument: str = "data") -> None:
    check_type(argument, data, Data, "see Data.from_arrays, from_datasets and from_loaders")


def _check_loader(label: str, loader: DataLoader[Any]) -> None:
    try:
        batches = len(loader)
        len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{label} must know how many batches and samples it has: {error}") from error
    if batches == 0:
        raise ValueError(f"{label} is empty")
    with torch.random.fork_rng(devices=[]):
        batch = next(iter(loader))
    try:
        as_batch(batch)
    except TypeError as error:
        raise TypeError(
            f"{label} must give pairs of tensors (inputs, targets), not {error}. Several inputs come in a tuple or a "
            'dict, as in ((a, b), targets), or in a dict with "labels"'
        ) from error


def _class_names(classes: Sequence[str] | int | None, labels: Tensor) -> tuple[str, ...]:
    if classes is None:
        classes = max(int(labels.max()) + 1, 1)
    return tuple(map(str, range(classes))) if isinstance(classes, int | np.integer) else tuple(map(str, classes))
