"""Rules for operations that move and combine values: pooling, reductions, reshaping, joining and splitting."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from structured_ensembles.tracing.layer_rules import pointwise
from structured_ensembles.tracing.layout import (
    NO_CHANNELS,
    Layout,
    Relation,
    Value,
    cut,
    extent,
    fix,
    fixed_layout,
    is_fixed,
    mix,
    new_layout,
    product,
    repeat_positions,
    unify,
)
from structured_ensembles.tracing.reshaping import reshape_dims
from structured_ensembles.tracing.rules import RULES, Call, Result, broadcast, fix_unknown, rule, with_dims

# Pooling and resampling ---------------------------------------------------------------------------------------------


def over_space(call: Call) -> Result:
    """Keep the channels of an operation on the last dimensions of an image or signal, the same for every channel."""
    inputs = call["self"] if "self" in call.arguments else call["input"]
    spatial = re.search(r"([123])d", call.name)
    assert spatial is not None, call.name
    kept = len(inputs.shape) - int(spatial[1])
    for dim in inputs.dims[kept:]:
        fix(dim, f"{call.name} runs over it")
    return with_dims(call, (*inputs.dims[:kept], *map(fixed_layout, call.shape[kept:])))


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
    """Give the output one channel per `upscale_factor`² input channels."""
    inputs, factor = call["self"], call["upscale_factor"]
    channel = len(inputs.shape) - 3
    written = new_layout(call.shape[channel])
    unify(inputs.dims[channel], repeat_positions(written, factor * factor))
    for dim in inputs.dims[-2:]:
        fix(dim, "pixel_shuffle runs over it")
    return Value(call.shape, (*inputs.dims[:channel], written, *map(fixed_layout, call.shape[-2:])))


@rule("pixel_unshuffle")
def pixel_unshuffle(call: Call) -> Result:
    """Give the output `downscale_factor`² channels per input channel."""
    inputs, factor = call["self"], call["downscale_factor"]
    channel = len(inputs.shape) - 3
    for dim in inputs.dims[-2:]:
        fix(dim, "pixel_unshuffle runs over it")
    written = repeat_positions(inputs.dims[channel], factor * factor)
    return Value(call.shape, (*inputs.dims[:channel], written, *map(fixed_layout, call.shape[-2:])))


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Result:
    """Add new channels for constant padding of the channel dimension; fix the others that are padded."""
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
            dims[dim] = fixed_layout(call.shape[dim])
            continue
        # Constant channels, as in the zero-padded shortcuts of a ResNet.
        front, back = (new_layout(count, padding=True) if count else () for count in (before, after))
        dims[dim] = (*front, *dims[dim], *back)
        expected[index], expected[index + 1] = front, back
    call.expected["pad"] = lambda size: [item if isinstance(item, int) else size(item) for item in expected]
    call.sizes["pad"] = expected
    return Value(call.shape, tuple(dims))


AVERAGES = frozenset(["mean", "sum", "var", "std", "norm", "linalg_vector_norm", "var_mean", "std_mean"])

# Reductions ---------------------------------------------------------------------------------------------------------


@rule(
    "mean", "sum", "amax", "amin", "prod", "var", "std", "logsumexp", "norm", "linalg_vector_norm", "argmax", "argmin"
)
@rule("var_mean", "std_mean", "any", "all")
def reduction(call: Call) -> Result:
    """Mark the dimensions that are reduced as mixed: a mean over channels is another one without some of them."""
    inputs = call["self"]
    dims = call.arguments.get("dim")
    rank = len(inputs.shape)
    reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    for dim in reduced:
        mark = mix if call.name in AVERAGES else fix
        mark(inputs.dims[dim], f"{call.name} runs over its channels")
    keep = call.arguments.get("keepdim", False)
    remaining = [
        fixed_layout(1) if dim in reduced else inputs.dims[dim] for dim in range(rank) if keep or dim not in reduced
    ]
    return [None if shape is None else Value(shape, tuple(remaining)) for shape in call.shapes]


@rule("max", "min")
def extremum(call: Call) -> Result:
    """Apply the rule of elementwise operations to two tensors, that of reductions to one."""
    return pointwise(call) if "other" in call.arguments else reduction(call)


# Shape --------------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze")
def reshape(call: Call) -> Result:
    """Regroup the layouts of a reshaped tensor."""
    inputs = call["self"]
    call.expected |= {"size": None, "shape": None, "sizes": None}
    dims = reshape_dims(inputs, call.shape, call.name)
    if call.name == "unflatten":
        start = call.dim()
        call.sizes["sizes"] = list(dims[start : start + len(call["sizes"])])
    elif call.name.startswith(("view", "reshape", "_unsafe")):
        call.sizes["shape" if "shape" in call.arguments else "size"] = list(dims)
    elif call.name == "squeeze":  # it would take away a dimension of which a single channel is left
        call.sizes["shape"] = list(dims)
        call.replacement = torch.ops.aten.reshape.default
    return Value(call.shape, dims)


@rule("permute", "transpose", "t", "numpy_T", "mT", "movedim", "swapaxes", "swapdims", "adjoint")
def permute(call: Call) -> Result:
    """Reorder the layouts as the operation reorders dimensions."""
    inputs = call["self"]
    # The operation itself shows the order, on a tensor whose sizes are all different.
    probe = torch.empty(tuple(range(2, 2 + len(inputs.shape))), device="meta")
    moved = call.apply(probe, *[argument for name, argument in call.arguments.items() if name != "self"])
    return Value(call.shape, tuple(inputs.dims[size - 2] for size in moved.shape))


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Result:
    """Give expanded dimensions new channels, which hold one value and fit any others."""
    inputs = call["self"]
    call.expected |= {"size": None}
    dims = []
    for position, size in enumerate(call.shape):
        dim = position - len(call.shape) + len(inputs.dims)
        if dim >= 0 and inputs.shape[dim] == size:
            dims.append(inputs.dims[dim])
        else:  # the same value at every position: any of them may be dropped
            dims.append(new_layout(size) if size > 1 else fixed_layout(1))
    call.sizes["size"] = list(dims)
    return Value(call.shape, tuple(dims))


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
def constant(call: Call) -> Result:
    """Give a constant tensor new channels that no layer computes."""
    call.expected |= {"size": None}
    dims = tuple(new_layout(size, padding=True) if size > 1 else fixed_layout(size) for size in call.shape)
    call.sizes["size"] = list(dims)
    return Value(call.shape, dims)


@rule("arange")
def count(call: Call) -> Result:
    """Fix positions that are counted: without some of them, the others would get other numbers."""
    start, step = call.arguments.get("start", 0), call.arguments.get("step", 1)
    counted = new_layout(call.shape[0], fixed="arange counts its positions", counted=True)
    if (start, step) == (0, 1) and call["end"] == call.shape[0]:
        call.sizes["end"] = counted  # of samples there may be another number
    return Value(call.shape, (counted,))


@rule("repeat")
def repeat(call: Call) -> Result:
    """Repeat the layout of each dimension; a single position becomes new channels of one value, as in expand."""
    inputs, counts = call["self"], list(call["repeats"])
    added = len(counts) - len(inputs.shape)
    dims: list[Layout] = []
    for index, (size, count) in enumerate(zip(call.shape, counts, strict=True)):
        before = inputs.dims[index - added] if index >= added else fixed_layout(1)
        if count == size > 1:  # such as a position encoding that is repeated for every sample
            dims.append(new_layout(size))
            counts[index] = dims[-1]
            continue
        copies = new_layout(count, fixed=NO_CHANNELS, counted=True) if count > 1 else fixed_layout(count)
        repeated = product(copies, before)
        if repeated is None:
            return fix_unknown(call, "repeat of channels of many pieces")
        counts[index] = copies  # of samples there may be another number
        dims.append(repeated)
    call.expected["repeats"] = lambda counted: [item if isinstance(item, int) else counted(item) for item in counts]
    call.sizes["repeats"] = counts
    return Value(call.shape, tuple(dims))


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Result:
    """Repeat every position of one dimension, such as the heads of keys that several queries share."""
    inputs, repeats = call.arguments.get("self"), call.arguments.get("repeats")
    if not isinstance(inputs, Value) or not isinstance(repeats, int) or call["dim"] is None:
        return fix_unknown(call, "repeat_interleave by a tensor")
    dim = call.dim()
    return Value(call.shape, replace_dim(inputs.dims, dim, repeat_positions(inputs.dims[dim], repeats)))


# Joining and splitting ----------------------------------------------------------------------------------------------


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Result:
    """Join the layouts of one dimension, and unify the others."""
    tensors = [value for value in call["tensors"] if math.prod(value.shape)]
    joined = int(call["dim"]) % len(call.shape)
    dims = list(tensors[0].dims)
    for other in tensors[1:]:
        for dim in set(range(len(dims))) - {joined}:
            unify(dims[dim], other.dims[dim], Relation.SUM)
    dims[joined] = tuple(run for value in tensors for run in value.dims[joined])
    return Value(call.shape, tuple(dims))


@rule("stack")
def stack(call: Call) -> Result:
    """Unify the tensors and insert a dimension without channels."""
    tensors, new = call["tensors"], int(call["dim"]) % len(call.shape)
    dims = broadcast([value.dims for value in tensors], tensors[0].shape, Relation.SUM)
    return Value(call.shape, (*dims[:new], fixed_layout(call.shape[new]), *dims[new:]))


@rule("slice", "narrow")
def take_slice(call: Call) -> Result:
    """Cut the layout of one dimension."""
    inputs, dim = call["self"], call.dim()
    old, new = inputs.shape[dim], call.shape[dim]
    start_argument, step = call["start"], call.arguments.get("step", 1)
    start = min(max((start_argument or 0) + (old if (start_argument or 0) < 0 else 0), 0), old)
    if new == old:
        return Value(call.shape, inputs.dims)
    if is_fixed(inputs.dims[dim]) or step != 1:
        fix(inputs.dims[dim], f"{call.name} takes every {step}th channel")
        return Value(call.shape, replace_dim(inputs.dims, dim, fixed_layout(new)))
    before = cut(inputs.dims[dim], 0, start)

    def expected_start(size: Callable[[Layout], int]) -> int | None:
        # A negative start counts from the end, where other channels may be missing too.
        if start_argument is None:
            return None
        return size(before) - (size(inputs.dims[dim]) if start_argument < 0 else 0)

    call.expected |= {"start": expected_start, "end": None, "length": None}
    kept = cut(inputs.dims[dim], start, new)
    call.sizes |= (
        {"start": before, "length": kept} if call.name == "narrow" else {"start": before, "end": before + kept}
    )
    return Value(call.shape, replace_dim(inputs.dims, dim, kept))


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(call: Call) -> Result:
    """Cut the layout of one dimension into consecutive pieces."""
    inputs, dim = call["self"], call.dim()
    call.expected |= {"split_size": None, "split_sizes": None}
    pieces, start = [], 0
    for shape in call.shapes:
        assert shape is not None
        pieces.append(cut(inputs.dims[dim], start, shape[dim]))
        start += shape[dim]
    if call.name.endswith(("chunk", "tensor_split")) and len({extent(piece) for piece in pieces}) > 1:
        # The borders depend on how many channels are left.
        fix(inputs.dims[dim], f"{call.name} makes unequal parts of it")
    elif call.name.endswith("chunk") or "sections" in call.arguments:
        # Equal pieces stay equal only if they lose the same channels.
        for piece in pieces[1:]:
            unify(pieces[0], piece)
    call.sizes["split_sizes"] = pieces
    call.replacement = torch.ops.aten.split_with_sizes.default
    return [
        Value(shape, replace_dim(inputs.dims, dim, piece))
        for shape, piece in zip(call.shapes, pieces, strict=True)
        if shape is not None
    ]


@rule("glu")
def gated_linear_unit(call: Call) -> Result:
    """Unify the two halves of the input: one gates the other."""
    inputs, dim = call["self"], call.dim()
    half = inputs.shape[dim] // 2
    value, gate = cut(inputs.dims[dim], 0, half), cut(inputs.dims[dim], half, half)
    unify(value, gate, Relation.GATE)
    return Value(call.shape, replace_dim(inputs.dims, dim, value))


def replace_dim(dims: Sequence[Layout], position: int, layout: Layout) -> tuple[Layout, ...]:
    """Return the layouts with another one at `position`."""
    return (*dims[:position], layout, *dims[position + 1 :])
