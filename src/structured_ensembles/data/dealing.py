"""Deal a batch out to the members."""

import torch
from torch import Tensor


def deal(batch: int, members: int, turn: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """Which samples of a batch each member gets: indices of shape (members, share), share = ⌈batch / members⌉.

    Every sample is used. If the batch does not divide evenly, some are dealt twice, never to the same member; with
    `turn`, the number of the step (a number, or a tensor of shape (1,)), the members that get them change.
    """
    share = -(-batch // members)
    hands = (torch.arange(members * share, device=device) % batch).view(members, share)
    return hands[(torch.arange(members, device=device) - turn) % members]
