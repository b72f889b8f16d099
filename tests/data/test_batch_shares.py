"""Shares of a batch: every member gets equally many samples."""

import pytest
import torch

from structured_ensembles.data.batch_shares import assign_samples


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("batch", range(1, 13))
def test_shares_are_equal_without_repeats_and_use_every_sample(batch: int, members: int) -> None:
    for step in range(2 * members):
        shares = assign_samples(batch, members, step)
        assert shares.shape == (members, -(-batch // members))
        assert all(len(share.unique()) == len(share) for share in shares)
        assert torch.equal(shares.unique(), torch.arange(batch))


def test_extra_samples_rotate_among_members() -> None:
    # Seven samples for three members: two are used twice, by a member that changes with every step.
    extra = [assign_samples(7, 3, step)[:, -1].tolist() for step in range(3)]
    assert extra == [[2, 5, 1], [1, 2, 5], [5, 1, 2]]
