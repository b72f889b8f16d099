"""Per-sample random numbers: a hash of (seed, stream, sample, position), the same on every device.

A generator's numbers depend on how many were drawn before, so that a set cut into other batches would be corrupted in
another way. A hash needs no history, and computes all samples of a batch at once, wherever they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structured_ensembles.common.hashing import mix_bits

SMALL_RATE = 12.0  # Poisson draws are inverted term by term below it; above it the expansion is as good


@dataclass(frozen=True)
class Draws:
    """Random numbers of some samples, by named streams: the same stream gives the same numbers again."""

    seed: int
    samples: Tensor  # their indices in the whole set, int64 (batch,)
    purpose: str = ""  # what they are drawn for: another purpose, other numbers

    def uniform(self, stream: str, shape: Sequence[int] = (), low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw floats between low and high, both excluded, shape (batch, *shape)."""
        positions = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=self.samples.device)
        first, second = self._keys(stream)
        bits = mix_bits(
            mix_bits(positions * -1640531527 + first[:, None]) ^ second[:, None]
        )  # 2³²/golden ratio, as int32
        # The 23 upper bits, in the middle of their cell: every value is an exact float, and never 0 or 1.
        floats = ((bits >> 9) & 0x7FFFFF).float().add_(0.5).mul_(2**-23)
        return floats.mul_(high - low).add_(low).view(len(self.samples), *shape)

    def normal(self, stream: str, shape: Sequence[int] = ()) -> Tensor:
        """Draw standard normal floats, shape (batch, *shape)."""
        return self.uniform(stream, shape, -1.0, 1.0).erfinv_().mul_(2**0.5)

    def integers(self, stream: str, shape: Sequence[int], low: int, high: int) -> Tensor:
        """Draw int64 from low to high, high excluded, shape (batch, *shape)."""
        return self.uniform(stream, shape, low, high).floor_().clamp_max_(high - 1).long()

    def poisson(self, stream: str, rates: Tensor) -> Tensor:
        """Draw Poisson counts as floats for rates (batch, …), by inverting one uniform number each."""
        uniform = self.uniform(stream, rates.shape[1:])
        normal = (2 * uniform - 1).erfinv_().mul_(2**0.5)
        root = rates.clamp_min(SMALL_RATE).sqrt()
        # Cornish-Fisher: the quantile of a Poisson distribution from that of the normal one.
        square = normal.square()
        quantile = rates + root * normal + (square - 1) / 6 + normal * (1 - square) / (72 * root)
        counts = (quantile + 0.5).floor_().clamp_min_(0)
        small = rates < SMALL_RATE
        counts[small] = _invert_poisson(uniform[small], rates[small])
        return counts

    def _keys(self, stream: str) -> tuple[Tensor, Tensor]:
        """Compute two int32 keys per sample, (batch,). Every step is a bijection, so samples never share a key."""
        base = zlib.crc32(f"{self.seed} {self.purpose} {stream}".encode())
        low, high = self.samples & 0x7FFFFFFF, self.samples >> 31
        start = torch.full_like(low, base - 2**31).int()
        first = mix_bits(start ^ mix_bits(low.int() * -1640531527 + high.int()))
        return first, mix_bits(mix_bits(first) + 0x27D4EB2F)


def _invert_poisson(uniform: Tensor, rates: Tensor) -> Tensor:
    """Find the smallest count whose cumulated probability reaches `uniform`, for small rates."""
    counts, term = torch.zeros_like(rates), (-rates).exp()
    cumulated = term.clone()
    for count in range(1, 48):  # the remaining probability is far below a float's resolution
        counts += uniform > cumulated
        term *= rates / count
        cumulated += term
    return counts
