"""Rules for operations that pick positions: by numbers, by tensors of indices, or by masks."""

from __future__ import annotations

from structured_ensembles.tracing.layout import Relation, Value, fix, fixed_layout, unify
from structured_ensembles.tracing.rules import Call, Result, broadcast, fix_unknown, rule
from structured_ensembles.tracing.shape_rules import replace_dim


@rule("select", "unbind")
def select(call: Call) -> Result:
    """Fix the dimension from which single positions are picked."""
    inputs, dim = call["self"], call.dim()
    fix(inputs.dims[dim], f"{call.name} picks single channels")
    left = (*inputs.dims[:dim], *inputs.dims[dim + 1 :])
    return [None if shape is None else Value(shape, left) for shape in call.shapes]


@rule("index")
def index(call: Call) -> Result:
    """Fix the dimensions that tensors of indices pick from, such as the offsets in a table of position biases."""
    inputs, indices = call["self"], call["indices"]
    if call.data_dependent:
        return _mask(call)
    picked = [dim for dim, position in enumerate(indices) if position is not None]
    index_rank = len(call.shape) - (len(inputs.shape) - len(picked))
    values = [position for position in indices if isinstance(position, Value)]
    if not values or index_rank != max(len(value.shape) for value in values):
        return fix_unknown(call, "an index of an unknown kind")
    for dim in picked:
        fix(inputs.dims[dim], "index picks single channels")
    adjacent = picked == list(range(picked[0], picked[-1] + 1))
    start = picked[0] if adjacent else 0
    shape = call.shape[start : start + index_rank]
    index_dims = broadcast([value.dims for value in values], shape, Relation.SAME)
    left = [layout for dim, layout in enumerate(inputs.dims) if dim not in picked]
    dims = (*left[:start], *index_dims, *left[start:])
    return Value(call.shape, tuple(dims))


def _mask(call: Call) -> Result:
    """Fix the dimensions that a mask picks positions from; those positions become one dimension."""
    inputs, indices = call["self"], call["indices"]
    masks = [position for position in indices if position is not None]
    if len(masks) > 1:
        return fix_unknown(call, "an index by a mask and others")
    (mask,) = masks
    first = indices.index(mask)
    after = first + len(mask.shape)
    for layout in (*inputs.dims[first:after], *mask.dims):
        fix(layout, "a mask picks single channels")
    picked = fixed_layout(call.shape[first], "a mask picks them")
    return Value(call.shape, (*inputs.dims[:first], picked, *inputs.dims[after:]))


@rule("sym_size")
def size_of_picked(call: Call) -> Result:
    """Fix a dimension whose size, which depends on data, is read as a number."""
    fix(call["self"].dims[call.dim()], "its size depends on data")
    return None


@rule("index_select")
def index_select(call: Call) -> Result:
    """Fix the dimension that indices pick from."""
    inputs, dim = call["self"], call.dim()
    fix(inputs.dims[dim], f"{call.name} picks single channels")
    return Value(call.shape, replace_dim(inputs.dims, dim, fixed_layout(call.shape[dim])))


@rule("gather")
def gather(call: Call) -> Result:
    """Fix the dimension that indices pick from, with others of it at every position of the other dimensions."""
    inputs, indices, picked = call["self"], call["index"], call.dim()
    for dim, layout in enumerate(inputs.dims):
        if dim != picked and inputs.shape[dim] == indices.shape[dim]:
            unify(layout, indices.dims[dim])
        else:  # of a dimension that is longer than the indices, the first positions are read
            fix(layout, "gather picks single channels")
    return Value(call.shape, indices.dims)
