"""Layouts after view, reshape and flatten."""

from __future__ import annotations

import math

from structured_ensembles.tracing.layout import (
    MAX_REPEATS,
    ChannelSet,
    Layout,
    Run,
    Value,
    cut,
    extent,
    fix,
    fixed_layout,
    is_fixed,
    product,
    resolve,
    split_product,
    unify,
)


def reshape_dims(value: Value, shape: tuple[int, ...], name: str) -> tuple[Layout, ...]:
    """Return the layouts of the dimensions of `value` viewed as `shape`."""
    result: list[Layout] = []
    for old, new in _match_dims(value.shape, shape):
        before = [dim for dim in old if value.shape[dim] != 1]
        after = [dim for dim in new if shape[dim] != 1]
        layouts = iter(_regroup([value.dims[dim] for dim in before], [shape[dim] for dim in after], name))
        result += [next(layouts) if shape[dim] != 1 else fixed_layout(1) for dim in new]
    return tuple(result)


def _match_dims(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[range, range]]:
    """Pair the shortest ranges of dimensions that hold equally many elements."""
    pairs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left = right = 1
        while True:
            if left == right and (i > start_i or j > start_j) and left > 1:
                break
            if left <= right and i < len(old):
                left *= old[i]
                i += 1
            elif j < len(new):
                right *= new[j]
                j += 1
            else:  # only dimensions of size 1 are left
                break
        pairs.append((range(start_i, i), range(start_j, j)))
    return pairs


def _regroup(old: list[Layout], new: list[int], name: str) -> list[Layout]:
    """Return the layouts when dimensions `old` (none of size 1) become dimensions of sizes `new`."""
    if len(old) == len(new) == 1:
        return old
    flat = _flatten(old) if old else None
    regrouped = None if flat is None else _unflatten(flat, new)
    if regrouped is None:
        for layout in old:
            fix(layout, f"{name} takes its channels apart")
        return [fixed_layout(size) for size in new]
    return regrouped


def _flatten(old: list[Layout]) -> Layout | None:
    """Return the layout of dimensions that are flattened to one; None if no layout can say that."""
    flat: Layout | None = old[-1]
    for outer in reversed(old[:-1]):
        flat = None if flat is None else product(outer, flat)
    return flat


def _unflatten(flat: Layout, sizes: list[int]) -> list[Layout] | None:
    """Return the layouts of dimensions of these sizes that one dimension is viewed as; None if they do not fit.

    The pieces of a concatenation must each fill whole positions of the first dimension, and are alike in the others; or
    the first dimension stays whole, and every position of it has the same pieces.
    """
    if not sizes:
        return []
    inner = math.prod(sizes[1:])
    runs = resolve(flat)
    pieces = [None if run.extent % inner else _unflatten_run(run, [run.extent // inner, *sizes[1:]]) for run in runs]
    if any(piece is None for piece in pieces):
        return _unflatten_alike(flat, sizes)
    first, *others = (piece for piece in pieces if piece is not None)
    for other in others:
        for one_dim, other_dim in zip(first[1:], other[1:], strict=True):
            unify(one_dim, other_dim)
    outer = tuple(run for piece in (first, *others) for run in piece[0])
    return [outer, *first[1:]]


def _unflatten_alike(flat: Layout, sizes: list[int]) -> list[Layout] | None:
    """Return the layouts when every position of the first dimension has the same channels, and none of it may go."""
    if is_fixed(flat):
        return [fixed_layout(size) for size in sizes]
    inner = math.prod(sizes[1:])
    if len(sizes) == 1 or sizes[0] * len(flat) > MAX_REPEATS:
        return None
    first, *others = (cut(flat, position * inner, inner) for position in range(sizes[0]))
    for other in others:
        unify(first, other)
    inside = _unflatten(first, sizes[1:])
    return None if inside is None else [fixed_layout(sizes[0], "its groups are made of several pieces"), *inside]


def _unflatten_run(run: Run, sizes: list[int]) -> list[Layout] | None:
    """Deal the factors of a product out to dimensions, from the innermost on; a set may become a product itself."""
    factors: list[ChannelSet] = []
    for factor in run.factors:  # 6 · 4 positions that stay may become 8 · 3
        if factors and factor.fixed and factors[-1].fixed and not factor.batch and not factors[-1].batch:
            factors[-1] = ChannelSet(factors[-1].size * factor.size, factors[-1].fixed)
        else:
            factors.append(factor)
    dims: list[Layout] = []
    for size in reversed(sizes):
        taken: list[ChannelSet] = []
        missing = size
        while missing > 1:
            factor = factors.pop()
            if missing % factor.size == 0:
                taken.insert(0, factor)
                missing //= factor.size
            elif factor.size % missing == 0:
                rest, inner = split_product(factor, missing)
                factors.append(rest)
                taken.insert(0, inner)
                missing = 1
            else:
                return None
        dims.insert(0, (Run(tuple(taken)),) if taken else fixed_layout(1))
    assert math.prod(map(extent, dims)) == run.extent
    return dims
