"""Layouts after view, reshape and flatten."""

from __future__ import annotations

import math

from structured_ensembles.tracing.layout import Layout, Value, fix, fixed_layout, is_fixed, repeat_positions, resolve

MAX_REPEATS = 4096  # of the channels inside one flattened dimension; a longer layout would be too slow


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
    if all(is_fixed(layout) for layout in old):
        return [fixed_layout(size) for size in new]
    if len(new) == 1:
        return [_flatten(old, name)]
    if len(old) == 1:
        runs = resolve(old[0])
        inner = math.prod(new[1:])
        if all(run.block % inner == 0 for run in runs):  # the inverse of a flatten
            outer = tuple(run._replace(block=run.block // inner) for run in runs)
            return [outer, *map(fixed_layout, new[1:])]
    for layout in old:
        fix(layout, f"{name} takes its channels apart")
    return [fixed_layout(size) for size in new]


def _flatten(old: list[Layout], name: str) -> Layout:
    """Return the layout of dimensions that are flattened to one; at most one of them may have removable channels."""
    channels = [index for index, layout in enumerate(old) if not is_fixed(layout)]
    sizes = [sum(run.extent for run in layout) for layout in old]
    index = channels[0]
    outer, inner = math.prod(sizes[:index]), math.prod(sizes[index + 1 :])
    if len(channels) == 1 and outer <= MAX_REPEATS:
        return repeat_positions(old[index], inner) * outer
    for layout in old:
        fix(layout, f"{name} merges its channels with another dimension")
    return fixed_layout(math.prod(sizes))
