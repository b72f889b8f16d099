"""Hashes of inputs by integer arithmetic, the same on every device: they decide which elements MC-Dropout drops."""

from __future__ import annotations

import torch
from torch import Tensor

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


def mix_bits(x: Tensor) -> Tensor:
    """Hash int32 numbers so that every bit depends on every bit (lowbias32, by Chris Wellons).

    Integers wrap around on every device, so that all devices agree.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        shifted = x >> shift  # the only new memory, which costs more than the arithmetic
        shifted &= 2 ** (32 - shift) - 1
        shifted ^= x
        shifted *= as_int32(factor)
        x = shifted
    return x


def as_int32(number: int) -> int:
    """Wrap the number modulo 2^32 to between -2^31 and 2^31."""
    return (number + 2**31) % 2**32 - 2**31
