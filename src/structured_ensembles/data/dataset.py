"""Data: a training, a validation and a test split for one task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from structured_ensembles.common.checks import check_choice, check_flags, check_path, check_type, check_whole
from structured_ensembles.common.inputs import Inputs, Shape, batch_size, map_inputs, select_rows
from structured_ensembles.common.plurals import counted
from structured_ensembles.data.arrays import stack_samples
from structured_ensembles.data.assembly import Task, assemble_arrays, assemble_loaders, is_chosen
from structured_ensembles.data.drawing import Seed
from structured_ensembles.data.folder import CACHE_BYTES, read_folder
from structured_ensembles.data.kinds import (
    Kinds,
    Normalizations,
    kind_of,
    kinds_of,
)
from structured_ensembles.data.normalization import Choice, Normalization
from structured_ensembles.data.preparation import prepare_inputs, prepare_targets
from structured_ensembles.data.splits import (
    Batch,
    Split,
    TensorSplit,
    first_batch,
)

SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True, repr=False)
class Data:
    """A data set for one task; `from_arrays`, `from_datasets`, `from_loaders`, `from_folder`, `load_data` make one.

    Pixels are stored as uint8 and reach a network as floats in [0,1], normalised; columns of floats are standardised;
    other floats stay as they are; ids, such as those of tokens, are whole numbers. A network of several inputs gets a
    tuple as positional arguments, a dict as keyword arguments, each input by its type: see `from_arrays`.

    normalization: applied to inputs on their way to a network; None: pixels in [0,1], floats as they are.
    normalization_settled: whether the user chose it, or it was fitted to a network; else a network that was trained on
        inputs of another normalisation gets that one, see `find_normalization`.
    examined: whether a network was examined with these data already, see `examine`.
    """

    task: Task
    classes: tuple[str, ...]  # their names; empty for regression
    train: Split
    validation: Split | None
    test: Split | None
    normalization: Normalization | Normalizations | None = None
    name: str = "arrays"
    ids: bool = False
    normalization_settled: bool = False
    examined: bool = False

    def __repr__(self) -> str:
        description = counted(self.num_classes, "class") if self.classes else self.task
        by_name = {name: getattr(self, name) for name in ("train", "validation", "test")}
        splits = ", ".join(f"{name}: {split}" for name, split in by_name.items() if split is not None)
        stored = self.train.inputs if isinstance(self.train, TensorSplit) else None
        columns = isinstance(stored, Tensor) and stored.dim() == 2 and not self.ids
        standardized = ", columns standardised" if columns and self.normalization is not None else ""
        return f"Data({self.name}, {description}, {splits}{standardized})"

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
        normalization: Choice = "auto",
        standardize: bool = True,
    ) -> Data:
        """Make data from arrays: inputs (samples, …) and targets (samples,), or (samples, values) for regression.

        inputs: uint8 arrays are pixels, (samples, channels, height, width) if they are images; other numbers become
            floats. Images of other whole numbers, such as uint16, need a `normalization`. A tuple or a dict of arrays
            are the inputs of a network that takes several: of these, whole numbers (ids) and booleans (masks) stay
            such.
        targets: whole numbers are class labels, floats make it a regression, unless `task` says otherwise; floats that
            seem to be classes, such as one-hot rows, need one.
        validation: the share of the training samples to hold out, drawn with `seed` and, for classification, the same
            share of every class; or a pair of arrays.
        classes: names of the classes, or their number; by default as many as the labels say.
        ids: inputs are indices, such as those of tokens for an embedding, and stay whole numbers.
        normalization: what a network gets. The ensemble keeps it, and applies it whenever it predicts.
            "none" or None: pixels from 0 to 255, floats as they are.
            "unit": pixels in [0,1], floats as they are.
            "standard": the data's own mean 0 and deviation 1 for each channel or column.
            "imagenet": pixels in [0,1], or floats as they are, less ImageNet's mean, over its deviation.
            (mean, deviation): numbers, or lists with one for each channel or column, of pixels in [0,1] or of floats
            as they are; or a `Normalization`.
            "auto": "standard" for uint8 images, "unit" for other pixels; float columns (samples, columns) are
            standardised by the training samples, unless they nearly are already; other floats stay as they are, images
            of another scale with a warning. If a network turns out to be trained on inputs of another normalisation, it
            gets that one, and a warning says so.
            Several inputs of pixels or floats: one of these words for all, or a dict (for a tuple of inputs, a list)
            with a choice for each.
        standardize: False leaves float columns as they are.
        """
        check_flags(ids=ids, standardize=standardize)
        assembled = assemble_arrays(
            inputs, targets, test, validation, classes, task, seed, ids, normalization, standardize
        )
        return cls(*assembled[:-1], name, ids, assembled.settled)

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
        normalization: Choice = "auto",
        standardize: bool = True,
    ) -> Data:
        """Make data from map-style datasets of (input, target): images, arrays or tensors, read once into memory.

        An input may be a tuple or a dict of several; a dict with "labels" is an input and its target.
        Images (PIL, or uint8 arrays) become pixels (channels, height, width); random transforms would be frozen, so
        leave augmentation to the recipe. The other arguments are those of `from_arrays`.
        """
        check_flags(ids=ids, standardize=standardize)  # before the datasets are read
        if classes is None:
            classes = getattr(train, "classes", None)
        held_out = validation if isinstance(validation, Real) else stack_samples("validation", validation)
        return cls.from_arrays(
            *stack_samples("train", train),
            test=None if test is None else stack_samples("test", test),
            validation=held_out,
            classes=classes,
            task=task,
            seed=seed,
            name=name,
            ids=ids,
            normalization=normalization,
            standardize=standardize,
        )

    @classmethod
    def from_loaders(
        cls,
        train: DataLoader[Any],
        *,
        validation: DataLoader[Any] | None = None,
        test: DataLoader[Any] | None = None,
        classes: Sequence[str] | int | None = None,
        normalization: Choice = "auto",
        name: str = "loaders",
        ids: bool = False,
    ) -> Data:
        """Make data from DataLoaders of (inputs, targets), which are streamed: for data that do not fit in memory.

        Batch size, order, augmentation are the loaders' own. `classes` may be left out for regression (float targets),
        and where the loader's dataset has an attribute `classes`. Inputs may be a tuple or dict of tensors; a dict with
        "labels" is inputs and targets.

        normalization: as in `from_arrays`, but for "standard", which would need a pass over the data: "auto" leaves
            floats, also columns, as they are and brings pixels to [0,1].
        """
        check_flags(ids=ids)
        assembled = assemble_loaders(train, validation, test, classes, ids, normalization)
        return cls(*assembled[:-1], name, ids, assembled.settled)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        size: int | None = None,
        test: float | str | Path | None = None,
        validation: float | str | Path | None = None,
        channels: Literal[1, 3] = 3,
        seed: int = 0,
        normalization: Choice = "auto",
        workers: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        name: str | None = None,
    ) -> Data:
        """Make data from a folder of pictures with a folder for each class, which may be more than fit in memory.

        Classes are sorted by name, and hold PNG, JPEG, WebP, BMP, GIF or TIFF files, also in folders of their own. If
        `path` has a folder `train` or `training` of such classes, that is the training split, and `test` or `testing`
        and `val`, `valid` or `validation` beside it are the others.

        All pictures are decoded once, with a bar: those that cannot be read are named in the log and left out, and
        their contents become the fingerprint of the data, by which a run that resumes knows them. As many as fit in
        `cache_bytes` stay in memory. The others are streamed: threads decode the batches of every member ahead of its
        step, again in every epoch. Order, crops, flips and results are the same, bit for bit; only a checkpoint tells
        the two apart.

        size: of the square that is cut out of the middle of each picture and resized; None: pictures as they are,
            which must then all have the same size.
        test, validation: a folder of the same classes, or a share of the training pictures of every class, drawn by
            seed 0 and by `seed`. By default the folders below `path`; without one, no test and a validation of 0.1.
        channels: 3 for RGB, 1 for grey; pictures are converted. Transparent parts are white.
        normalization: as in `from_arrays`; "auto" and "standard" are measured on the training pictures.
        workers: how many threads decode; by default one for each core.
        """
        path = check_path("path", path)
        folder = read_folder(path, size, channels, test, validation, seed, normalization, workers, cache_bytes)
        return cls(
            "classification",
            folder.classes,
            *(folder.train, folder.validation, folder.test),
            folder.normalization,
            path.expanduser().resolve().name if name is None else name,
            normalization_settled=is_chosen(normalization),
        )

    @property
    def num_classes(self) -> int:
        """Return the number of classes; 0 for regression."""
        return len(self.classes)

    @property
    def shape(self) -> Any:
        """Return the shape of one input; of several, a tuple or dict of shapes."""
        shape: Shape = map_inputs(lambda tensor: tuple(tensor.shape[1:]), self.example(1))
        return shape

    @property
    def kinds(self) -> Kinds | None:
        """Return the kind of each of several inputs, such as "pixels"; None for one input."""
        return kinds_of(first_batch(self.train, 1)[0], self.ids)

    @property
    def pixels(self) -> bool:
        """Tell whether inputs are pixels: uint8, and not ids."""
        inputs, _ = first_batch(self.train, 1, seed=0)
        return isinstance(inputs, Tensor) and kind_of(inputs, self.ids) == "pixels"

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Return the shape of one target: () for a label or a single value."""
        if self.task == "classification":
            return ()
        return tuple(first_batch(self.train, 1, seed=0)[1].shape[1:])

    def example(self, batch: int = 2, dtype: torch.dtype = torch.float32) -> Any:
        """Return a batch as a network gets it, (batch, …), such as for `trace`; a tuple or dict of several inputs."""
        check_whole("batch", batch)
        inputs, _ = first_batch(self.train, batch)
        return self.prepare(select_rows(inputs, torch.arange(batch) % batch_size(inputs)), dtype)

    def split(self, name: SplitName) -> Split:
        """Return a split by name; raise a ValueError if there is none."""
        check_choice("split", name, get_args(SplitName))
        split: Split | None = getattr(self, name)
        if split is None:
            others = [other for other in get_args(SplitName) if getattr(self, other) is not None]
            raise ValueError(f"data has no {name} split, only {' and '.join(others)}")
        return split

    def batches(
        self,
        split: SplitName,
        size: int,
        *,
        seed: Seed | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[Batch]:
        """Yield batches as a network gets them: prepared inputs (size, …), and targets; shuffled if there is a seed."""
        check_whole("size", size)
        for inputs, targets in self.split(split).batches(size, seed, device):
            yield self.prepare(inputs, dtype), prepare_targets(targets, dtype)

    def num_batches(self, split: SplitName, size: int) -> int:
        """Return the number of batches of a split."""
        check_whole("size", size)
        return self.split(split).num_batches(size)

    def prepare(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Any:
        """Prepare stored inputs for a network: as floats (pixels in [0,1]), normalised; or as ids."""
        return prepare_inputs(inputs, dtype, self.normalization, self.ids)

    def to(self, device: torch.device | str) -> Data:
        """Copy the tensors to a device; streamed splits stay as they are."""
        splits = {label: getattr(self, label) for label in ("train", "validation", "test")}
        return replace(self, **{label: split.to(device) for label, split in splits.items() if split is not None})


def check_data(data: Any, argument: str = "data") -> None:
    """Raise a TypeError unless `data` is a `Data`."""
    check_type(argument, data, Data, "see Data.from_arrays, from_datasets, from_loaders and from_folder")
