"""A counter-based random generator, the same on every device: a hashed counter (SplitMix64, Steele et al. 2014).

A GPU draws the order of an epoch and the crops of its images by itself; a CPU, or a run that resumes from a checkpoint,
draws the same.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

Seed = int | tuple[int, ...]

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw(seed: Seed, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw whole numbers, uniform from 0 to 2⁶³ - 1, shape (count,)."""
    start = fold(seed)
    counter = torch.arange(count, device=device) * _signed(_STEP) + _signed(start)
    return _mix_tensor(counter) & (2**63 - 1)


def shuffle(index: Tensor, seed: Seed) -> Tensor:
    """Return the entries of `index`, shape (samples,), in random order."""
    return index[draw(seed, len(index), index.device).argsort(stable=True)]


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Derive a seed of 63 bits from a run's seed, a purpose and numbers such as a member's and an epoch's.

    `derive_seed(0, "order", member, epoch)`: no two runs, members, epochs or purposes share one. `seed + member` would
    let member 1 of seed 0 draw what member 0 of seed 1 draws.
    """
    return fold((seed, zlib.crc32(purpose.encode()), *numbers))


def fold(seed: Seed) -> int:
    """Fold a seed of several numbers into one number of 63 bits."""
    folded = 0
    for number in seed if isinstance(seed, tuple) else (seed,):
        folded = _mix(folded + _STEP + number)
    return folded >> 1


def _mix(number: int) -> int:
    """Hash a number to 64 bits."""
    number &= _MASK
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _mix_tensor(numbers: Tensor) -> Tensor:
    """Hash int64 numbers as `_mix` does; their products wrap around, and their shifts are masked to drop the sign."""
    numbers = (numbers ^ ((numbers >> 30) & (2**34 - 1))) * _signed(_FIRST)
    numbers = (numbers ^ ((numbers >> 27) & (2**37 - 1))) * _signed(_SECOND)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def _signed(number: int) -> int:
    """Read 64 bits as a signed number."""
    return number - 2**64 if number >= 2**63 else number
