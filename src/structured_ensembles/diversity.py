"""Diversity of the members' vectors: the distance between them, and the penalties that increase it.

The paper's term is the maximum mean discrepancy with a Gaussian kernel exp(-(a-b)²/n) between the entries of two
vectors of length n. In one dimension that kernel has an explicit feature map,

    φ_k(a) = exp(-a²/n) · (√(2/n)·a)^k / √k!,      k = 0, 1, 2, …,      Σ_k φ_k(a)·φ_k(b) = exp(-(a-b)²/n),

so that MMD² (the biased V-statistic) is the squared distance of two mean feature vectors: a sum of squares, never
negative, without the cancellation that ruins the textbook formula for wide layers, and linear in n instead of
quadratic. The squares φ_k(a)² are Poisson probabilities with mean 2a²/n, which tells how many features are enough.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from scipy import special
from torch import Tensor
from torch.autograd.function import once_differentiable

from structured_ensembles.common.checks import check_type

Diversity = Literal["mmd", "overlap"]
MAX_TERMS = 300
EPSILON = 1e-6  # keeps the reciprocal finite for members that are equal


def mmd2(one: Tensor, other: Tensor) -> Tensor:
    """Compute MMD² between the entries of two vectors: shapes (…, n) and (…, n) give (…)."""
    for argument, vector in (("one", one), ("other", other)):
        check_type(argument, vector, Tensor)
    if one.shape != other.shape or one.numel() == 0:
        shapes = f"{tuple(one.shape)} and {tuple(other.shape)}"
        raise ValueError(f"one and other must be vectors of the same length, not of shapes {shapes}")
    both = torch.stack([one, other], dim=-2)
    return distances(both, terms_for(float(both.detach().abs().max()), both.shape[-1]))[..., 0, 1]


def mmd_penalty(vectors: Mapping[str, Tensor], terms: Mapping[str, int]) -> Tensor:
    """Average 1 / (Σ_groups MMD² + ε) over the pairs of members: the sum in the paper's Eq. 4 with its 2/(N(N-1)).

    vectors: shape (members, size) per group; terms: how many features for each, from `terms_for`.
    """
    by_size: dict[int, list[str]] = {}
    for name, vector in vectors.items():
        by_size.setdefault(vector.shape[1], []).append(name)
    # Groups of one size are computed together: one by one, they take half of all launches of a search's step.
    parts = [
        distances(torch.stack([vectors[name] for name in names]), max(terms[name] for name in names)).sum(0)
        for names in by_size.values()
    ]
    total = torch.stack(parts).sum(0)
    above_diagonal = torch.ones_like(total).triu(1)  # indexing the pairs would sort in the backward pass
    return (above_diagonal / (total + EPSILON)).sum() / math.comb(len(total), 2)


def distances(vectors: Tensor, terms: int) -> Tensor:
    """Compute MMD² between every two vectors: shape (…, members, n) gives (…, members, members), in float64."""
    if terms > MAX_TERMS:  # entries are so far apart that the kernel itself is cheaper
        gaps = vectors.double()[..., :, None, :, None] - vectors.double()[..., None, :, None, :]
        kernel = (-gaps.square() / vectors.shape[-1]).exp().mean((-1, -2))
        within = kernel.diagonal(dim1=-2, dim2=-1)
        return within[..., :, None] + within[..., None, :] - 2 * kernel
    features = mean_features(vectors, terms)
    return (features[..., :, None, :] - features[..., None, :, :]).square().sum(-1)


def mean_features(vectors: Tensor, terms: int) -> Tensor:
    """Average the kernel's feature vectors over the entries: shape (…, n) gives (…, terms), in float64."""
    return _Features.apply(vectors.double() * (2 / vectors.shape[-1]) ** 0.5, terms).mean(-2)  # type: ignore[no-any-return]


class _Features(torch.autograd.Function):
    """The features φ_k(u) = exp(-u²/2) · u^k / √k!, k = 0, 1, …: (…) gives (…, terms); φ_k' = √k · φ_(k-1) - u · φ_k.

    The backward of `cumprod` in PyTorch synchronises with the host, to see whether an entry is zero.
    """

    @staticmethod
    def forward(ctx: Any, scaled: Tensor, terms: int) -> Tensor:
        roots = torch.arange(1, terms, dtype=scaled.dtype, device=scaled.device).sqrt()
        factors = torch.cat([(-scaled.square() / 2).exp()[..., None], scaled[..., None] / roots], dim=-1)
        features = factors.cumprod(-1)
        ctx.save_for_backward(scaled, features, roots)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        scaled, features, roots = ctx.saved_tensors
        lower_terms = (gradient[..., 1:] * roots * features[..., :-1]).sum(-1)
        return lower_terms - scaled * (gradient * features).sum(-1), None


def terms_for(bound: float, size: int) -> int:
    """Return how many features describe vectors of length `size` with entries up to `bound`, to float64 precision."""
    mean, level = 2 * bound * bound / size, 1 - 1e-16
    last = math.ceil(special.pdtrik(level, mean))  # the quantile of a Poisson distribution, up to rounding
    if special.pdtr(max(last - 1, 0), mean) >= level:
        last = max(last - 1, 0)
    return last + 2


def overlap_penalty(saliencies: Sequence[Tensor]) -> Tensor:
    """Average the correlation of the members' saliencies over pairs and groups: how much they agree on what matters.

    saliencies: shape (members, size) per group. In contrast to the MMD, it knows which neuron an entry belongs to.
    """
    agreement = []
    for saliency in saliencies:
        centred = saliency - saliency.mean(-1, keepdim=True)
        direction = centred / (centred.norm(dim=-1, keepdim=True) + torch.finfo(saliency.dtype).tiny)
        agreement.append(_pairs(direction @ direction.mT).mean())
    return torch.stack(agreement).mean()


def _pairs(matrix: Tensor) -> Tensor:
    """Return the entries above the diagonal, shape (pairs,)."""
    rows, columns = torch.triu_indices(len(matrix), len(matrix), offset=1, device=matrix.device)
    return matrix[rows, columns]
