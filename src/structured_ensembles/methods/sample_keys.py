"""Keys of the masks of MC-Dropout: hashes of the inputs, the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from structured_ensembles.common.hashing import as_int32, mix_bits
from structured_ensembles.common.inputs import Inputs, tensors_in

MAXIMUM = 2**31 - 1


def sample_keys(inputs: Inputs, members: int, seed: int) -> Tensor:
    """Compute a key for each mask of each row, (members * batch,) int32, from the row's contents."""
    first, *others = map(_hash_rows, tensors_in(inputs))
    contents = first
    for other in others:
        contents = other + mix_bits(contents)
    samples = torch.arange(members, dtype=torch.int32, device=contents.device)
    return mix_bits(contents + mix_bits(mix_bits(samples) + as_int32(seed))[:, None]).flatten()


def _hash_rows(x: Tensor) -> Tensor:
    """Hash each row: (batch,) int32."""
    rows = x.detach().reshape(len(x), -1)
    # In bfloat16, so that devices agree although they normalise pixels with different rounding errors.
    bits = (rows.bfloat16().view(torch.int16) if rows.is_floating_point() else rows).to(torch.int32)
    positions = torch.arange(bits.shape[1], dtype=torch.int32, device=x.device)
    return mix_bits(bits + mix_bits(positions)).sum(1, dtype=torch.int32)
