"""Splits of a data set, in memory or streamed from a loader; and holding out samples for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from structured_ensembles.common.checks import check_seed
from structured_ensembles.common.inputs import Inputs, join_batches, map_inputs, move_inputs, select_rows, tensors_in
from structured_ensembles.common.plurals import counted
from structured_ensembles.data.arrays import check_labels, split_labels
from structured_ensembles.data.drawing import Seed, shuffle
from structured_ensembles.data.random_states import iterate_isolated
from structured_ensembles.storage.fingerprints import add_tensor, describe, digest_json

Batch = tuple[Inputs, Tensor]


class Split(Protocol):
    """Samples of a data set, read in batches of stored inputs (size, …) and targets (size, …)."""

    def __len__(self) -> int: ...

    def num_batches(self, size: int) -> int: ...

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield batches, shuffled if there is a seed; the last one may be smaller."""
        ...

    def to(self, device: torch.device | str) -> Split: ...


@runtime_checkable
class IndexedSplit(Split, Protocol):
    """Samples that can be read in any order: every member of an ensemble draws batches and crops of its own.

    targets: of all stored samples, (stored, …). index: which of them the split has, (samples,).
    """

    targets: Tensor
    index: Tensor

    def read(self, rows: Tensor) -> Batch:
        """Read stored samples by their rows (count,)."""
        ...

    def fingerprint(self) -> str:
        """Compute a fingerprint of all samples."""
        ...


def batch_sizes(samples: int, size: int) -> list[int]:
    """Return the sizes of all batches; a final batch of one sample, which batch norm refuses, borrows one more."""
    full, remaining = divmod(samples, size)
    if remaining == 1 and full and size > 2:
        return [size] * (full - 1) + [size - 1, 2]
    return [size] * full + [remaining] * (remaining > 0)


@dataclass(frozen=True, repr=False)
class TensorSplit:
    """Some samples of stored tensors: inputs (stored, …), targets (stored, …) and the index of each, (samples,).

    inputs: one tensor, or a tuple or dict of several. Several splits may share the stored tensors; only batches are
        ever copied.
    """

    inputs: Inputs
    targets: Tensor
    index: Tensor

    def __repr__(self) -> str:
        shapes = map_inputs(
            lambda tensor: f"{tensor.dtype} of shape {tuple(tensor.shape[1:])}".removeprefix("torch."), self.inputs
        )
        lines = [f"{name}: {shape}" for name, shape in shapes.items()] if isinstance(shapes, dict) else shapes
        return f"TensorSplit({counted(len(self), 'sample')}, {lines if isinstance(lines, str) else '; '.join(lines)})"

    def __len__(self) -> int:
        return len(self.index)

    def num_batches(self, size: int) -> int:
        return -(-len(self) // size)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        order = self.index
        if seed is not None:
            order = shuffle(order, seed)
        for rows in order.split(batch_sizes(len(self), size)):
            yield move_inputs(select_rows(self.inputs, rows), device), self.targets[rows].to(device)

    def read(self, rows: Tensor) -> Batch:
        return select_rows(self.inputs, rows), self.targets[rows]

    def fingerprint(self) -> str:
        hashed = hashlib.sha256(f"TensorSplit {len(self)}".encode())
        _add_batch(hashed, (self.inputs, self.targets), self.index)
        return hashed.hexdigest()

    def to(self, device: torch.device | str) -> TensorSplit:
        return replace(
            self, inputs=move_inputs(self.inputs, device), targets=self.targets.to(device), index=self.index.to(device)
        )


@dataclass(frozen=True)
class StreamedSplit:
    """The batches of a DataLoader, in its size and order; its random draws depend on a seed, see `iterate_isolated`.

    classes: how many there are, so that the labels of every batch can be checked; None for a regression.
    """

    loader: DataLoader[Any]
    classes: int | None = None

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def num_batches(self, size: int) -> int:
        return len(self.loader)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        for batch in iterate_isolated(self.loader, seed):
            inputs, targets = parse_batch(batch)
            yield move_inputs(inputs, device), self._check_labels(targets).to(device)

    def _check_labels(self, targets: Tensor) -> Tensor:
        """Check a batch's labels before they reach a loss, which on a GPU would abort the whole process."""
        if self.classes is None:
            return targets
        if targets.is_floating_point():
            raise TypeError(f"a loader's targets must be labels in every batch, as in the first, not {targets.dtype}")
        check_labels("a loader's targets", targets, self.classes)
        return targets.long()

    def to(self, device: torch.device | str) -> StreamedSplit:
        return self


def parse_batch(batch: Any) -> Batch:
    """Check and convert a loader's batch: (inputs, targets), or a dict with "labels".

    Several inputs come in a list, tuple or dict. The TypeError says what was given, for the caller to complete.
    """
    if isinstance(batch, Mapping):
        batch = split_labels(batch)
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise TypeError(f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, list | tuple) else ""))
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    elif isinstance(inputs, list):
        inputs = tuple(inputs)
    tensors = tensors_in(inputs) if isinstance(inputs, Tensor | tuple | dict) else []
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in (*tensors, targets)):
        raise TypeError(f"a {type(batch).__name__} of other things than tensors")
    return inputs, targets


def fingerprint_split(split: Split) -> str:
    """Compute the fingerprint of a split: of all samples; of a loader's data set, length and first batch.

    Of a loader's data set all attributes count, such as arrays, paths and transforms, but no file is opened. The first
    batch counts only if it is the same twice: some loaders draw from random states that cannot be set.
    """
    if isinstance(split, IndexedSplit):
        return split.fingerprint()
    hashed = hashlib.sha256(f"{type(split).__name__} {len(split)}".encode())
    hashed.update(f"{split.num_batches(1)} batches".encode())
    if isinstance(split, StreamedSplit):
        loader, sampler = split.loader, getattr(split.loader, "sampler", None)  # not every loader is torch's
        hashed.update(digest_json(describe([loader.dataset, sampler], loose=True)).encode())
    first, second = hashlib.sha256(), hashlib.sha256()
    for hash_of_batch in (first, second):
        for batch in islice(split.batches(1, seed=(0,)), 1):
            _add_batch(hash_of_batch, batch)
    if first.digest() == second.digest():
        hashed.update(first.digest())
    return hashed.hexdigest()


def _add_batch(hashed: Any, batch: Batch, rows: Tensor | None = None) -> None:
    """Add the structure and the tensors of a batch to a fingerprint."""
    inputs, targets = batch
    hashed.update(str(list(inputs) if isinstance(inputs, dict) else type(inputs).__name__).encode())
    for tensor in (targets, *tensors_in(inputs)):
        add_tensor(hashed, tensor, rows)


def hold_out(strata: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the samples kept and of those held out: a share of every stratum, drawn with `seed`.

    strata: shape (samples,), such as the labels. Every stratum keeps at least one sample.
    """
    generator = torch.Generator().manual_seed(check_seed(seed))
    order, strata = torch.randperm(len(strata), generator=generator), strata.cpu()
    by_stratum = order[strata[order].argsort(stable=True)]
    sizes = strata.unique(return_counts=True)[1].tolist()
    held_out = torch.zeros(len(strata), dtype=torch.bool)
    for of_stratum in by_stratum.split(sizes):
        held_out[of_stratum[: min(round(share * len(of_stratum)), len(of_stratum) - 1)]] = True
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()


def first_batch(split: Split, size: int, seed: Seed | None = None) -> Batch:
    """Return the first samples of a split; a loader decides on their number itself, and draws from `seed`."""
    if isinstance(split, IndexedSplit) and len(split):
        return split.read(split.index[:size])
    batch = next(iter(split.batches(size, seed)), None)
    if batch is None:
        raise ValueError("there are no samples to take a batch of")
    return batch


def take_samples(split: Split, count: int) -> Batch:
    """Return at most `count` samples: spread over an indexed split, or a loader's first; random states stay."""
    if isinstance(split, IndexedSplit):
        positions = torch.linspace(0, len(split) - 1, min(count, len(split)), dtype=torch.float64).round().long()
        return split.read(split.index[positions.to(split.index.device)])
    batches: list[Batch] = []
    for batch in split.batches(count, seed=(0,)):
        if batches and sample_shapes(batch) != sample_shapes(batches[0]):  # such as sentences padded to another length
            break
        batches.append(batch)
        if sum(len(targets) for _, targets in batches) >= count:
            break
    inputs, targets = zip(*batches, strict=True)
    return select_rows(join_batches(inputs), slice(count)), torch.cat(targets)[:count]


def sample_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shape of one sample of each input of a batch."""
    return [tensor.shape[1:] for tensor in tensors_in(batch[0])]
