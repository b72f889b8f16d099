"""The splits of a data set: in memory, or streamed; and how samples are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from structured_ensembles.common.checks import checked_seed
from structured_ensembles.common.inputs import Inputs, each, joined, moved, rows_of, tensors_in
from structured_ensembles.data.arrays import check_labels, labelled
from structured_ensembles.data.drawing import Seed, shuffled
from structured_ensembles.data.random_states import undisturbed
from structured_ensembles.storage.fingerprints import add_tensor, described, digest_of

Batch = tuple[Inputs, Tensor]


class Split(Protocol):
    """Samples that come in batches of inputs (size, …) as they are stored, and targets (size, …)."""

    def __len__(self) -> int: ...

    def num_batches(self, size: int) -> int: ...

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Shuffled if there is a seed; the last batch may be smaller."""
        ...

    def to(self, device: torch.device | str) -> Split: ...


def batch_sizes(samples: int, size: int) -> list[int]:
    """The last batch has what is left. A single sample, which no batch normalisation takes, gets one from before."""
    whole, left = divmod(samples, size)
    if left == 1 and whole and size > 2:
        return [size] * (whole - 1) + [size - 1, 2]
    return [size] * whole + [left] * (left > 0)


@dataclass(frozen=True, repr=False)
class TensorSplit:
    """Some samples of stored tensors: inputs (stored, …), targets (stored, …), and which of them, shape (samples,).

    inputs: one tensor, or a tuple or dict of several. Several splits may share the stored tensors; only batches are
        ever copied.
    """

    inputs: Inputs
    targets: Tensor
    index: Tensor

    def __repr__(self) -> str:
        shapes = each(lambda own: f"{own.dtype} of shape {tuple(own.shape[1:])}".removeprefix("torch."), self.inputs)
        named = [f"{name}: {shape}" for name, shape in shapes.items()] if isinstance(shapes, dict) else shapes
        return f"TensorSplit({len(self):,} samples, {named if isinstance(named, str) else '; '.join(named)})"

    def __len__(self) -> int:
        return len(self.index)

    def num_batches(self, size: int) -> int:
        return -(-len(self) // size)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        order = self.index
        if seed is not None:
            order = shuffled(order, seed)
        for rows in order.split(batch_sizes(len(self), size)):
            yield moved(rows_of(self.inputs, rows), device), self.targets[rows].to(device)

    def to(self, device: torch.device | str) -> TensorSplit:
        return replace(
            self, inputs=moved(self.inputs, device), targets=self.targets.to(device), index=self.index.to(device)
        )


@dataclass(frozen=True)
class StreamedSplit:
    """What a DataLoader gives: its own batch size and order. What it draws is told by a seed; see `undisturbed`.

    classes: how many there are, so that the labels of every batch can be checked; None for a regression.
    """

    loader: DataLoader[Any]
    classes: int | None = None

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def num_batches(self, size: int) -> int:
        return len(self.loader)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        for batch in undisturbed(self.loader, seed):
            inputs, targets = as_batch(batch)
            yield moved(inputs, device), self._checked(targets).to(device)

    def _checked(self, targets: Tensor) -> Tensor:
        """Check a batch's labels before they reach a loss, which on a GPU would take the whole process down."""
        if self.classes is None:
            return targets
        if targets.is_floating_point():
            raise TypeError(f"a loader's targets must be labels in every batch, as in the first, not {targets.dtype}")
        check_labels("a loader's targets", targets, self.classes)
        return targets.long()

    def to(self, device: torch.device | str) -> StreamedSplit:
        return self


def as_batch(given: Any) -> Batch:
    """Check and convert a loader's batch: (inputs, targets), or a dict with "labels".

    Several inputs come in a list, tuple or dict. The TypeError says what was given, for the caller to complete.
    """
    if isinstance(given, Mapping):
        given = labelled(given)
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise TypeError(f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, list | tuple) else ""))
    inputs, targets = given
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    elif isinstance(inputs, list):
        inputs = tuple(inputs)
    several = tensors_in(inputs) if isinstance(inputs, Tensor | tuple | dict) else []
    if not several or not all(isinstance(own, Tensor) for own in (*several, targets)):
        raise TypeError(f"a {type(given).__name__} of other things than tensors")
    return inputs, targets


def digest(split: Split) -> str:
    """Digest what tells two splits apart: all samples in memory; of a loader its data set, length and first batch.

    Of a loader's data set all that it keeps counts, such as arrays, paths and transforms, but no file is opened. Its
    first batch counts only if it is the same twice: some draw from random states that nobody can set.
    """
    found = hashlib.sha256(f"{type(split).__name__} {len(split)}".encode())
    if isinstance(split, TensorSplit):
        _add_batch(found, (split.inputs, split.targets), split.index)
        return found.hexdigest()
    found.update(f"{split.num_batches(1)} batches".encode())
    if isinstance(split, StreamedSplit):
        loader = split.loader
        found.update(digest_of(described([loader.dataset, loader.sampler], loose=True)).encode())
    first, second = hashlib.sha256(), hashlib.sha256()
    for own in (first, second):
        for batch in islice(split.batches(1, seed=(0,)), 1):
            _add_batch(own, batch)
    if first.digest() == second.digest():
        found.update(first.digest())
    return found.hexdigest()


def _add_batch(found: Any, batch: Batch, rows: Tensor | None = None) -> None:
    inputs, targets = batch
    found.update(str(list(inputs) if isinstance(inputs, dict) else type(inputs).__name__).encode())
    for tensor in (targets, *tensors_in(inputs)):
        add_tensor(found, tensor, rows)


def hold_out(strata: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the samples kept and of those held out: the same share of every stratum, drawn with `seed`.

    strata: shape (samples,), such as the labels. Every stratum keeps at least one sample.
    """
    generator = torch.Generator().manual_seed(checked_seed(seed))
    shuffled = torch.randperm(len(strata), generator=generator)
    held_out = torch.zeros(len(strata), dtype=torch.bool)
    for stratum in strata.unique():
        members = shuffled[strata[shuffled] == stratum]
        held_out[members[: min(round(share * len(members)), len(members) - 1)]] = True
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()


def some_samples(split: Split, count: int) -> Batch:
    """Return at most `count` samples: spread over a split in memory, or a loader's first; random states stay."""
    if isinstance(split, TensorSplit):
        places = torch.linspace(0, len(split) - 1, min(count, len(split)), dtype=torch.float64).round().long()
        rows = split.index[places.to(split.index.device)]
        return rows_of(split.inputs, rows), split.targets[rows]
    batches: list[Batch] = []
    for batch in split.batches(count, seed=(0,)):
        if batches and _shapes(batch) != _shapes(batches[0]):  # such as sentences padded to another length
            break
        batches.append(batch)
        if sum(len(targets) for _, targets in batches) >= count:
            break
    inputs, targets = zip(*batches, strict=True)
    return rows_of(joined(inputs), slice(count)), torch.cat(targets)[:count]


def _shapes(batch: Batch) -> list[torch.Size]:
    return [own.shape[1:] for own in tensors_in(batch[0])]
