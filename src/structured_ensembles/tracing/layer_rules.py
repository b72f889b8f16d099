"""Rules for what computes: layers, normalisation, pointwise operations."""

from __future__ import annotations

from collections.abc import Sequence

from structured_ensembles.tracing.layout import How, Value, blocks, fix, is_fixed, plain, unify
from structured_ensembles.tracing.rules import Call, Result, broadcast, first_of, rule, unknown

COMPUTED_WEIGHT = "read with a weight that is computed, not a parameter"

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


@rule("prelu")
def prelu(call: Call) -> Result:
    inputs, weight = call["self"], call["weight"]
    if weight.shape and weight.shape[0] > 1:
        unify(weight.dims[0], inputs.dims[1])
    return Value(call.shape, inputs.dims)
