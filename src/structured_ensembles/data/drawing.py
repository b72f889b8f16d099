"""Random numbers that are the same on every device: a counter, hashed (SplitMix64, Steele et al. 2014).

A GPU can draw the order of an epoch and the crops of its pictures by itself, and a CPU, or a run that goes on from a
checkpoint, draws the same.
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
    """Whole numbers, uniform from 0 to 2⁶³ - 1, shape (count,)."""
    start = fold(seed)
    counter = torch.arange(count, device=device) * _signed(_STEP) + _signed(start)
    return _mixed(counter) & (2**63 - 1)


def shuffled(index: Tensor, seed: Seed) -> Tensor:
    """The entries of `index`, shape (samples,), in random order."""
    return index[draw(seed, len(index), index.device).argsort(stable=True)]


def stream(seed: int, purpose: str, *numbers: int) -> int:
    """Derive a seed of 63 bits from a run's seed, a purpose and numbers such as a member's and an epoch's.

    `stream(0, "order", member, epoch)`: no two runs, members, epochs or purposes share one. `seed + member` would let
    member 1 of seed 0 draw what member 0 of seed 1 draws.
    """
    return fold((seed, zlib.crc32(purpose.encode()), *numbers))


def fold(seed: Seed) -> int:
    """One number of 63 bits for a seed of several parts."""
    folded = 0
    for part in seed if isinstance(seed, tuple) else (seed,):
        folded = _mix(folded + _STEP + part)
    return folded >> 1


def _mix(number: int) -> int:
    number &= _MASK
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _mixed(numbers: Tensor) -> Tensor:
    """As `_mix`, for int64, whose products wrap around and whose shifts must be kept from copying the sign."""
    numbers = (numbers ^ ((numbers >> 30) & (2**34 - 1))) * _signed(_FIRST)
    numbers = (numbers ^ ((numbers >> 27) & (2**37 - 1))) * _signed(_SECOND)
    return numbers ^ ((numbers >> 31) & (2**33 - 1))


def _signed(number: int) -> int:
    """The same 64 bits, read as a signed number."""
    return number - 2**64 if number >= 2**63 else number
