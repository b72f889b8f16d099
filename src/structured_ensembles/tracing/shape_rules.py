"""Rules for what only moves and combines: pooling, reductions, reshaping, joining and taking apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from structured_ensembles.tracing.layer_rules import pointwise
from structured_ensembles.tracing.layout import (
    How,
    Layout,
    Value,
    blocks,
    cut,
    extent,
    fix,
    fresh,
    is_fixed,
    plain,
    unify,
)
from structured_ensembles.tracing.reshaping import reshape_dims
from structured_ensembles.tracing.rules import RULES, Call, Result, broadcast, first_of, rule

# Pooling and resampling ---------------------------------------------------------------------------------------------


def over_space(call: Call) -> Result:
    """Works on the last dimensions of an image or signal, for every channel alike."""
    inputs = call["self"] if "self" in call.arguments else call["input"]
    spatial = re.search(r"([123])d", call.name)
    assert spatial is not None, call.name
    kept = len(inputs.shape) - int(spatial[1])
    for dim in inputs.dims[kept:]:
        fix(dim, f"{call.name} runs over it")
    return first_of(call, (*inputs.dims[:kept], *map(plain, call.shape[kept:])))


for dimensions in ("1d", "2d", "3d"):
    for stem in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "_adaptive_avg_pool", "lp_pool"):
        RULES[f"{stem}{dimensions}"] = RULES[f"{stem}{dimensions}_with_indices"] = over_space
    RULES[f"upsample_nearest{dimensions}"] = RULES[f"_upsample_nearest_exact{dimensions}"] = over_space
    for stem in ("reflection_pad", "replication_pad"):
        RULES[f"{stem}{dimensions}"] = over_space
for stem in ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"):
    RULES[stem] = RULES[f"_{stem}_aa"] = over_space


@rule("pixel_shuffle")
def pixel_shuffle(call: Call) -> Result:
    inputs, factor = call["self"], call["upscale_factor"]
    channel = len(inputs.shape) - 3
    written = fresh(call.shape[channel])
    unify(inputs.dims[channel], blocks(written, factor * factor))
    for dim in inputs.dims[-2:]:
        fix(dim, "pixel_shuffle runs over it")
    return Value(call.shape, (*inputs.dims[:channel], written, *map(plain, call.shape[-2:])))


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Result:
    inputs, amounts = call["self"], call["pad"]
    dims = list(inputs.dims)
    expected: list[Any] = list(amounts)
    for index in range(0, len(amounts), 2):
        before, after = amounts[index], amounts[index + 1]
        dim = len(dims) - 1 - index // 2
        if before == after == 0:
            continue
        if is_fixed(dims[dim]) or call.arguments.get("mode", "constant") != "constant" or min(before, after) < 0:
            fix(dims[dim], f"{call.name} changes its size")
            dims[dim] = plain(call.shape[dim])
            continue
        # Constants beside the channels, as in the zero-padded shortcuts of a ResNet.
        front, back = (fresh(n, padding=True) if n else () for n in (before, after))
        dims[dim] = (*front, *dims[dim], *back)
        expected[index], expected[index + 1] = front, back
    call.expected["pad"] = lambda size: [item if isinstance(item, int) else size(item) for item in expected]
    return Value(call.shape, tuple(dims))


# Reductions ---------------------------------------------------------------------------------------------------------


@rule(
    "mean", "sum", "amax", "amin", "prod", "var", "std", "logsumexp", "norm", "linalg_vector_norm", "argmax", "argmin"
)
@rule("var_mean", "std_mean", "any", "all")
def reduction(call: Call) -> Result:
    """Removes dimensions by combining what they hold: fine over space, impossible to keep exact over channels."""
    inputs = call["self"]
    dims = call.arguments.get("dim")
    rank = len(inputs.shape)
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    for dim in reduced:
        fix(inputs.dims[dim], f"{call.name} runs over its channels")
    keep = call.arguments.get("keepdim", False)
    left = [plain(1) if dim in reduced else inputs.dims[dim] for dim in range(rank) if keep or dim not in reduced]
    return [None if shape is None else Value(shape, tuple(left)) for shape in call.shapes]


@rule("max", "min")
def extremum(call: Call) -> Result:
    return pointwise(call) if "other" in call.arguments else reduction(call)


# Shape --------------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze")
def reshape(call: Call) -> Result:
    inputs = call["self"]
    call.expected |= {"size": None, "shape": None, "sizes": None}
    return Value(call.shape, reshape_dims(inputs, call.shape, call.name))


@rule("permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes", "swapdims", "adjoint")
def permute(call: Call) -> Result:
    inputs = call["self"]
    # Ask the operation itself, on a tensor whose sizes are all different.
    probe = torch.empty(tuple(range(2, 2 + len(inputs.shape))), device="meta")
    moved = call.apply(probe, *[argument for name, argument in call.arguments.items() if name != "self"])
    return Value(call.shape, tuple(inputs.dims[size - 2] for size in moved.shape))


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Result:
    inputs = call["self"]
    call.expected |= {"size": None}
    dims = []
    for position, size in enumerate(call.shape):
        own = position - len(call.shape) + len(inputs.dims)
        if own >= 0 and inputs.shape[own] == size:
            dims.append(inputs.dims[own])
        else:  # the same value at every position: whatever it is combined with may keep any of them
            dims.append(fresh(size))
    return Value(call.shape, tuple(dims))


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
def constant(call: Call) -> Result:
    call.expected |= {"size": None}
    return Value(call.shape, tuple(fresh(size, padding=True) for size in call.shape))


@rule("repeat")
def repeat(call: Call) -> Result:
    inputs, counts = call["self"], call["repeats"]
    added = len(counts) - len(inputs.shape)
    dims = [*map(plain, call.shape[:added]), *inputs.dims]
    return Value(
        call.shape, tuple(dim * count for dim, count in zip(dims, [*[1] * added, *counts[added:]], strict=True))
    )


# Joining and taking apart -------------------------------------------------------------------------------------------


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Result:
    tensors = [value for value in call["tensors"] if math.prod(value.shape)]
    joined = int(call["dim"]) % len(call.shape)
    dims = list(tensors[0].dims)
    for other in tensors[1:]:
        for dim in set(range(len(dims))) - {joined}:
            unify(dims[dim], other.dims[dim], How.SUM)
    dims[joined] = tuple(run for value in tensors for run in value.dims[joined])
    return Value(call.shape, tuple(dims))


@rule("stack")
def stack(call: Call) -> Result:
    tensors, new = call["tensors"], int(call["dim"]) % len(call.shape)
    dims = broadcast([value.dims for value in tensors], tensors[0].shape, How.SUM)
    return Value(call.shape, (*dims[:new], plain(call.shape[new]), *dims[new:]))


@rule("slice", "narrow")
def take_slice(call: Call) -> Result:
    inputs, dim = call["self"], call.dim()
    old, new = inputs.shape[dim], call.shape[dim]
    given, step = call["start"], call.arguments.get("step", 1)
    start = min(max((given or 0) + (old if (given or 0) < 0 else 0), 0), old)
    if new == old:
        return Value(call.shape, inputs.dims)
    if is_fixed(inputs.dims[dim]) or step != 1:
        fix(inputs.dims[dim], f"{call.name} takes every {step}th channel")
        return Value(call.shape, replaced(inputs.dims, dim, plain(new)))
    before = cut(inputs.dims[dim], 0, start)

    def expected_start(size: Callable[[Layout], int]) -> int | None:
        # A negative start counts from the end, where other channels may be missing too.
        return given if given is None else size(before) - (size(inputs.dims[dim]) if given < 0 else 0)

    call.expected |= {"start": expected_start, "end": None, "length": None}
    return Value(call.shape, replaced(inputs.dims, dim, cut(inputs.dims[dim], start, new)))


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(call: Call) -> Result:
    inputs, dim = call["self"], call.dim()
    call.expected |= {"split_size": None, "split_sizes": None}
    parts, start = [], 0
    for shape in call.shapes:
        assert shape is not None
        parts.append(cut(inputs.dims[dim], start, shape[dim]))
        start += shape[dim]
    if call.name.endswith(("chunk", "tensor_split")) and len({extent(part) for part in parts}) > 1:
        fix(inputs.dims[dim], f"{call.name} makes unequal parts of it")  # where, depends on how many are left
    elif call.name.endswith("chunk"):
        # Equal parts stay equal only if they lose the same channels.
        for part in parts[1:]:
            unify(parts[0], part)
    return [
        Value(shape, replaced(inputs.dims, dim, part))
        for shape, part in zip(call.shapes, parts, strict=True)
        if shape is not None
    ]


@rule("glu")
def gated_linear_unit(call: Call) -> Result:
    inputs, dim = call["self"], call.dim()
    half = inputs.shape[dim] // 2
    value, gate = cut(inputs.dims[dim], 0, half), cut(inputs.dims[dim], half, half)
    unify(value, gate, How.GATE)
    return Value(call.shape, replaced(inputs.dims, dim, value))


@rule("select", "unbind")
def select(call: Call) -> Result:
    inputs, dim = call["self"], call.dim()
    fix(inputs.dims[dim], f"{call.name} picks single channels")
    left = (*inputs.dims[:dim], *inputs.dims[dim + 1 :])
    return [None if shape is None else Value(shape, left) for shape in call.shapes]


def replaced(dims: Sequence[Layout], position: int, layout: Layout) -> tuple[Layout, ...]:
    return (*dims[:position], layout, *dims[position + 1 :])
