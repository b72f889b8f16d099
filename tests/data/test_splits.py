"""Splits of a data set: samples are held out by stratum, loaders of any kind are streamed."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.data.splits import fingerprint_split, hold_out


class OwnLoader:
    """A loader that is not torch's: it has batches, their number and a data set, and no sampler."""

    dataset = range(40)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 40, 10):
            rows = torch.arange(start, start + 10)
            yield rows[:, None].expand(10, 4) / 40, rows % 3


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.99])
def test_every_stratum_gives_its_share_of_a_random_order(share: float) -> None:
    strata = torch.tensor([3, 7, 7, 3, 7, 3, 3, 5, 7, 7] * 5)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(4)).tolist()
    expected = set()
    for stratum in (3, 5, 7):
        members = [sample for sample in order if strata[sample] == stratum]
        expected |= set(members[: min(round(share * len(members)), len(members) - 1)])
    kept, held_out = hold_out(strata, share, seed=4)
    assert held_out.tolist() == sorted(expected)
    assert kept.tolist() == sorted(set(range(50)) - expected)


def test_time_does_not_grow_with_the_number_of_strata() -> None:
    """A pass over all samples for each of the strata would take half a minute."""
    strata = torch.arange(200_000) % 50_000
    start = time.process_time()
    kept, held_out = hold_out(strata, 0.25, seed=0)
    assert time.process_time() - start < 8
    assert torch.equal(torch.bincount(strata[held_out]), torch.ones(50_000, dtype=torch.int64))
    assert len(kept) == 150_000


def test_a_loader_needs_no_sampler() -> None:
    data = se.Data.from_loaders(OwnLoader(), validation=OwnLoader(), classes=3)  # type: ignore[arg-type]
    assert [targets.tolist() for _, targets in data.batches("train", 10)][1][:3] == [1, 2, 0]
    assert fingerprint_split(data.train) == fingerprint_split(data.validation)
    network = nn.Linear(4, 3)
    se.train(se.Ensemble([network]), data, se.Recipe(epochs=1), quiet=True)
