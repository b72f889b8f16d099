"""The splits of a data set: in memory, or streamed; and how samples are held out for validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from structured_ensembles.data.drawing import Seed, fold, shuffled

Batch = tuple[Tensor, Tensor]


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

    Several splits may share the stored tensors; only batches are ever copied.
    """

    inputs: Tensor
    targets: Tensor
    index: Tensor

    def __repr__(self) -> str:
        kind = str(self.inputs.dtype).removeprefix("torch.")
        return f"TensorSplit({len(self):,} samples, {kind} of shape {tuple(self.inputs.shape[1:])})"

    def __len__(self) -> int:
        return len(self.index)

    def num_batches(self, size: int) -> int:
        return -(-len(self) // size)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        order = self.index
        if seed is not None:
            order = shuffled(order, seed)
        for rows in order.split(batch_sizes(len(self), size)):
            yield self.inputs[rows].to(device), self.targets[rows].to(device)

    def to(self, device: torch.device | str) -> TensorSplit:
        return replace(
            self, inputs=self.inputs.to(device), targets=self.targets.to(device), index=self.index.to(device)
        )


@dataclass(frozen=True)
class StreamedSplit:
    """What a DataLoader gives: its own batch size and order. A seed makes its shuffling repeatable."""

    loader: DataLoader[Any]

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def num_batches(self, size: int) -> int:
        return len(self.loader)

    def batches(self, size: int, seed: Seed | None = None, device: torch.device | str = "cpu") -> Iterator[Batch]:
        batches = iter(self.loader) if seed is None else self._seeded(seed)
        for inputs, targets in batches:
            yield inputs.to(device), targets.to(device)

    def _seeded(self, seed: Seed) -> Iterator[Any]:
        """The loader under a random state of its own: what it draws depends on the seed, and on nothing between."""
        own = torch.Generator().manual_seed(fold(seed)).get_state()
        batches: Iterator[Any] | None = None
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(own)
                batches = iter(self.loader) if batches is None else batches
                batch = next(batches, None)
                own = torch.get_rng_state()
            if batch is None:
                return
            yield batch

    def to(self, device: torch.device | str) -> StreamedSplit:
        return self


def hold_out(strata: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the samples kept and of those held out: the same share of every stratum, drawn with `seed`.

    strata: shape (samples,), such as the labels. Every stratum keeps at least one sample.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(strata), generator=generator)
    held_out = torch.zeros(len(strata), dtype=torch.bool)
    for stratum in strata.unique():
        members = shuffled[strata[shuffled] == stratum]
        held_out[members[: min(round(share * len(members)), len(members) - 1)]] = True
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()
