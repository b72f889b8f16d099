"""Rows of a batch that are grouped by member: member 0's first, then those of member 1, …"""

from __future__ import annotations

from torch import Tensor


def scale_rows(result: Tensor, factors: Tensor, dim: int) -> Tensor:
    """Multiply rows grouped by member, (members * rows, …), with `factors` (members, channels) along `dim`.

    The type stays that of the rows.
    """
    scaled = result.unflatten(0, (len(factors), -1)) * broadcast_per_member(factors, result, dim)
    return scaled.flatten(0, 1).to(result.dtype)


def broadcast_per_member(vectors: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshape vectors (members, channels) to broadcast along `dim` of `like`, unflattened to (members, rows, …)."""
    shape = [1] * (like.dim() + 1)
    shape[0], shape[dim] = vectors.shape
    return vectors.view(shape)
