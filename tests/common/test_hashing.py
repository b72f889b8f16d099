"""Integer hashes: they equal the published function, on any device."""

import numpy as np
import torch

from structured_ensembles.common.hashing import mix_bits


def test_hash_equals_lowbias32() -> None:
    """Compare with plain Python integers."""
    numbers = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    hashes = mix_bits(torch.tensor(np.array(numbers, dtype=np.uint32).view(np.int32)))
    for number, hashed in zip(numbers, hashes.numpy().view(np.uint32).tolist(), strict=True):
        x = number
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        assert hashed == x ^ (x >> 16)
