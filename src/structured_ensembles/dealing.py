"""Deal a batch out to the members."""

import torch
from torch import Tensor


def deal(batch: int, members: int, turn: int = 0) -> Tensor:
    """Which samples of a batch each member gets: indices of shape (members, share), share = ⌈batch / members⌉.

    Every sample is used. If the batch does not divide evenly, some are dealt twice, never to the same member; with
    `turn`, the number of the step, the members that get them change.
    """
    share = -(-batch // members)
    hands = (torch.arange(members * share) % batch).view(members, share)
    return hands.roll(turn % members, dims=0)
