"""Splits of a data set: samples are held out by stratum."""

import time

import pytest
import torch

from structured_ensembles.data.splits import hold_out


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
