"""Shares of a batch: which of its samples each member gets."""

import torch
from torch import Tensor


def assign_samples(batch: int, members: int, step: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return which samples of a batch each member gets: indices (members, share), share = ⌈batch / members⌉.

    Every sample is used. If the batch does not divide evenly, some are used twice, never by the same member; which
    members get them changes with `step`, the number of the step (a number, or a tensor of shape (1,)).
    """
    share = -(-batch // members)
    shares = (torch.arange(members * share, device=device) % batch).view(members, share)
    return shares[(torch.arange(members, device=device) - step) % members]
