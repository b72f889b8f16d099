"""Hold samples out for validation."""

import torch
from torch import Tensor


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
