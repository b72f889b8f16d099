"""What each ATen operation does to layouts. An operation without a rule fixes every channel it touches: we never guess.

A rule is a function of a `Call` that returns the layouts of the operation's result (one `Value`, or a list of them). It
unifies the dimensions that must hold the same channels, and fixes the ones that it mixes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

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

Result = Value | list[Value | None] | None
Expected = Callable[[Callable[[Layout], int]], Any]


class Layers(Protocol):
    """What rules report besides layouts: which layer computes channels, and which reads them."""

    def produce(self, weight: Value, channels: Layout) -> None: ...
    def consume(self, weight: Value, channels: Layout) -> None: ...


@dataclass
class Call:
    """One operation of the graph with its arguments by name."""

    name: str
    arguments: dict[str, Any]
    shapes: list[tuple[int, ...] | None]  # of its results
    layers: Layers
    apply: Callable[..., Any]
    # What the trial must find for an argument that holds channel counts: a function of the dimensions' new sizes, or
    # None where the shape of the result says it all. Every other argument must not change.
    expected: dict[str, Expected | None] = field(default_factory=dict)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.shapes[0]
        assert shape is not None
        return shape

    def dim(self, argument: str = "dim", of: str = "self") -> int:
        rank = len(self[of].shape)
        return int(self[argument]) % max(rank, 1)

    @property
    def values(self) -> list[Value]:
        """Its tensor arguments, those in lists included."""
        found = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            found += [item for item in items if isinstance(item, Value)]
        return found


COMPUTED_WEIGHT = "read with a weight that is computed, not a parameter"
Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def follow(call: Call) -> Result:
    """Apply the rule for `call`, or fix what it touches."""
    name = call.name.removesuffix("_")
    if name in RULES:
        return RULES[name](call)
    if torch.Tag.pointwise in getattr(call.apply, "tags", ()):
        return pointwise(call)
    return unknown(call, f"{call.name} is not understood")


def unknown(call: Call, reason: str) -> Result:
    for value in call.values:
        for dim in value.dims:
            fix(dim, reason)
    return [None if shape is None else Value(shape, tuple(plain(n, reason) for n in shape)) for shape in call.shapes]


def first_of(call: Call, dims: Sequence[Layout]) -> Result:
    """The result's first tensor has these layouts, and so have others of its shape (indices of maxima)."""
    others: list[Value | None] = []
    for shape in call.shapes[1:]:
        same = tuple(dims) if shape == call.shape else tuple(map(plain, shape or ()))
        others.append(None if shape is None else Value(shape, same))
    return [Value(call.shape, tuple(dims)), *others]


# Layers -------------------------------------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call) -> Result:
    inputs, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    transposed = "transpose" in call.name or call.arguments.get("transposed", False)
    channel = len(inputs.shape) - len(weight.shape) + 1
    read, written = inputs.dims[channel], weight.dims[1 if transposed else 0]
    if weight.parameter is None:
        fix(read, COMPUTED_WEIGHT)
    if groups == 1:
        unify(weight.dims[0 if transposed else 1], read)
        call.layers.consume(weight, read)
    elif groups == inputs.shape[channel] and not transposed:  # depthwise: every channel keeps to itself
        unify(written, blocks(read, weight.shape[0] // groups))
        call.expected["groups"] = lambda size: size(read)
    else:
        for dim in (read, *weight.dims):
            fix(dim, "grouped convolution")
        written = plain(call.shape[channel], "grouped convolution") if transposed else written
    if bias is not None:
        unify(bias.dims[0], written)
    if groups == 1 or groups != inputs.shape[channel]:
        call.layers.produce(weight, written)
    spatial = map(plain, call.shape[channel + 1 :])
    for dim in inputs.dims[channel + 1 :]:
        fix(dim, "convolved over")
    return Value(call.shape, (*inputs.dims[:channel], written, *spatial))


@rule("linear")
def linear(call: Call) -> Result:
    inputs, weight, bias = call["input"], call["weight"], call["bias"]
    if weight.parameter is None:
        fix(inputs.dims[-1], COMPUTED_WEIGHT)
    unify(weight.dims[1], inputs.dims[-1])
    call.layers.consume(weight, inputs.dims[-1])
    if bias is not None:
        unify(bias.dims[0], weight.dims[0])
    call.layers.produce(weight, weight.dims[0])
    return Value(call.shape, (*inputs.dims[:-1], weight.dims[0]))


@rule("matmul", "mm", "bmm")
def matmul(call: Call) -> Result:
    left, right = call["self"], call["other"] if "other" in call.arguments else call["mat2"]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return unknown(call, "a product of vectors")
    if left.parameter or right.parameter:
        unify(left.dims[-1], right.dims[-2])
    if right.parameter:
        call.layers.consume(right, left.dims[-1])
    for dim in () if left.parameter or right.parameter else (left.dims[-1], right.dims[-2]):
        fix(dim, f"{call.name} multiplies activations")
    batch = broadcast([left.dims[:-2], right.dims[:-2]], call.shape[:-2], How.SAME)
    if right.parameter and not is_fixed(right.dims[-1]):
        fix(right.dims[-1], f"computed from {right.parameter} by code outside a layer")
    return Value(call.shape, (*batch, left.dims[-2], right.dims[-1]))


@rule("embedding")
def embedding(call: Call) -> Result:
    weight, indices = call["weight"], call["indices"]
    for dim in weight.dims:
        fix(dim, "computed by an embedding")
    return Value(call.shape, (*indices.dims, weight.dims[1]))


# Normalisation ------------------------------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def per_channel_norm(call: Call) -> Result:
    inputs = call["input"]
    for argument in ("weight", "bias", "running_mean", "running_var"):
        if call[argument] is not None:
            unify(call[argument].dims[0], inputs.dims[1])
    for dim in (inputs.dims[0], *inputs.dims[2:]):  # in training mode, where it takes statistics over them
        fix(dim, f"{call.name} runs over it")
    return first_of(call, inputs.dims)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    normalized = len(call["normalized_shape"])
    return mixing_norm(call, range(-normalized, 0), f"{call.name} mixes its channels".replace("_", " "))


@rule("group_norm")
def group_norm(call: Call) -> Result:
    return mixing_norm(call, (1,), "group norm mixes its channels")


def mixing_norm(call: Call, dims: Sequence[int], reason: str) -> Result:
    inputs = call["input"]
    for dim in dims:
        fix(inputs.dims[dim], reason)
    for argument in ("weight", "bias"):
        affine = call.arguments.get(argument)
        if affine is not None:
            for own, dim in zip(affine.dims, dims, strict=True):
                unify(own, inputs.dims[dim])
    return Value(call.shape, inputs.dims)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "roll", "flip", "sort")
def along_dims(call: Call) -> Result:
    """Keeps the shape, mixes along some dimensions."""
    inputs = call["self"]
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    for dim in [dims] if isinstance(dims, int) else dims or range(len(inputs.shape)):
        fix(inputs.dims[dim], f"{call.name} runs over its channels")
    return first_of(call, inputs.dims)


# Pointwise ----------------------------------------------------------------------------------------------------------


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "bernoulli")
@rule("hardswish", "log_sigmoid", "relu6", "mish", "rsub", "multiply", "divide", "subtract", "floor_divide")
@rule("copy", "fill", "zero", "contiguous", "to", "_to_copy", "alias", "detach", "lift_fresh_copy", "lift_fresh")
@rule("type_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def pointwise(call: Call) -> Result:
    """Element by element, with broadcasting. A product is a gate; anything else that joins two layers is a sum."""
    name = call.name.removesuffix("_")
    how = How.GATE if name in ("mul", "multiply", "div", "divide") else How.SUM
    dims = broadcast([value.dims for value in call.values], call.shape, how)
    return first_of(call, dims)


def broadcast(operands: Sequence[Sequence[Layout]], shape: Sequence[int], how: How) -> list[Layout]:
    """The layouts of a broadcast result of `shape`; operands are aligned at their last dimension."""
    result: list[Layout] = []
    for position, size in enumerate(shape):
        meeting = []
        for dims in operands:
            own = position - len(shape) + len(dims)
            if own >= 0 and extent(dims[own]) == size > 1:
                meeting.append(dims[own])
        for other in meeting[1:]:
            unify(meeting[0], other, how)
        result.append(meeting[0] if meeting else plain(size))
    return result


@rule("prelu")
def prelu(call: Call) -> Result:
    inputs, weight = call["self"], call["weight"]
    if weight.shape and weight.shape[0] > 1:
        unify(weight.dims[0], inputs.dims[1])
    return Value(call.shape, inputs.dims)


@rule("max", "min")
def extremum(call: Call) -> Result:
    return pointwise(call) if "other" in call.arguments else reduction(call)


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
