"""Dealing a batch to members in equal hands."""

import pytest
import torch

from structured_ensembles.data.dealing import deal


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("batch", range(1, 13))
def test_deal_gives_equal_hands_without_repeats_using_every_sample(batch: int, members: int) -> None:
    for turn in range(2 * members):
        hands = deal(batch, members, turn)
        assert hands.shape == (members, -(-batch // members))
        assert all(len(hand.unique()) == len(hand) for hand in hands)
        assert torch.equal(hands.unique(), torch.arange(batch))


def test_extra_samples_rotate_among_members() -> None:
    # Seven samples for three members: two are dealt twice, to the last hand, which passes on with every turn.
    extra = [deal(7, 3, turn)[:, -1].tolist() for turn in range(3)]
    assert extra == [[2, 5, 1], [1, 2, 5], [5, 1, 2]]
