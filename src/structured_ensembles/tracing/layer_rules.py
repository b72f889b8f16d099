"""Rules for operations that compute: layers, norms, pointwise operations."""

from __future__ import annotations

from collections.abc import Sequence

from structured_ensembles.tracing.layout import Relation, Value, fix, fixed_layout, is_fixed, repeat_positions, unify
from structured_ensembles.tracing.rules import Call, Result, broadcast, fix_unknown, rule, with_dims

COMPUTED_WEIGHT = "read with a weight that is computed, not a parameter"

# Layers -------------------------------------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call) -> Result:
    """Unify input channels with the weight's, and give the output the weight's output channels."""
    inputs, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    transposed = "transpose" in call.name or call.arguments.get("transposed", False)
    channel = len(inputs.shape) - len(weight.shape) + 1
    read, written = inputs.dims[channel], weight.dims[1 if transposed else 0]
    if weight.parameter is None:
        fix(read, COMPUTED_WEIGHT)
    if groups == 1:
        unify(weight.dims[0 if transposed else 1], read)
        call.layers.consume(weight, read)
    elif groups == inputs.shape[channel] and not transposed:  # depthwise: each output channel reads one input channel
        unify(written, repeat_positions(read, weight.shape[0] // groups))
        call.expected["groups"] = lambda size: size(read)
    else:
        for dim in (read, *weight.dims):
            fix(dim, "grouped convolution")
        written = fixed_layout(call.shape[channel], "grouped convolution") if transposed else written
    if bias is not None:
        unify(bias.dims[0], written)
    if groups == 1 or groups != inputs.shape[channel]:
        call.layers.produce(weight, written)
    spatial = map(fixed_layout, call.shape[channel + 1 :])
    for dim in inputs.dims[channel + 1 :]:
        fix(dim, "convolved over")
    return Value(call.shape, (*inputs.dims[:channel], written, *spatial))


@rule("linear")
def linear(call: Call) -> Result:
    """Unify input features with the weight's, and give the output the weight's output features."""
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
    """Unify what a parameter multiplies; fix the channels over which two activations are multiplied."""
    left, right = call["self"], call["other"] if "other" in call.arguments else call["mat2"]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return fix_unknown(call, "a product of vectors")
    if left.parameter or right.parameter:
        unify(left.dims[-1], right.dims[-2])
    if right.parameter:
        call.layers.consume(right, left.dims[-1])
    for dim in () if left.parameter or right.parameter else (left.dims[-1], right.dims[-2]):
        fix(dim, f"{call.name} multiplies activations")
    batch = broadcast([left.dims[:-2], right.dims[:-2]], call.shape[:-2], Relation.SAME)
    if right.parameter and not is_fixed(right.dims[-1]):
        fix(right.dims[-1], f"computed from {right.parameter} by code outside a layer")
    return Value(call.shape, (*batch, left.dims[-2], right.dims[-1]))


@rule("embedding")
def embedding(call: Call) -> Result:
    """Fix the features of an embedding."""
    weight, indices = call["weight"], call["indices"]
    for dim in weight.dims:
        fix(dim, "computed by an embedding")
    return Value(call.shape, (*indices.dims, weight.dims[1]))


# Norms --------------------------------------------------------------------------------------------------------------


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def per_channel_norm(call: Call) -> Result:
    """Unify the parameters and statistics of a batch or instance norm with the channels."""
    inputs = call["input"]
    for argument in ("weight", "bias", "running_mean", "running_var"):
        if call[argument] is not None:
            unify(call[argument].dims[0], inputs.dims[1])
    for dim in (inputs.dims[0], *inputs.dims[2:]):  # training mode takes statistics over them
        fix(dim, f"{call.name} runs over it")
    return with_dims(call, inputs.dims)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    """Fix the dimensions that a layer norm normalises over."""
    normalized = len(call["normalized_shape"])
    return mixing_norm(call, range(-normalized, 0), f"{call.name} mixes its channels".replace("_", " "))


@rule("group_norm")
def group_norm(call: Call) -> Result:
    """Fix the channels, which a group norm normalises together."""
    return mixing_norm(call, (1,), "group norm mixes its channels")


def mixing_norm(call: Call, dims: Sequence[int], reason: str) -> Result:
    """Fix the dimensions `dims` of the input, and unify the affine parameters with them."""
    inputs = call["input"]
    for dim in dims:
        fix(inputs.dims[dim], reason)
    for argument in ("weight", "bias"):
        affine = call.arguments.get(argument)
        if affine is not None:
            for affine_dim, dim in zip(affine.dims, dims, strict=True):
                unify(affine_dim, inputs.dims[dim])
    return Value(call.shape, inputs.dims)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "roll", "flip", "sort")
def along_dims(call: Call) -> Result:
    """Fix the dimensions along which an operation mixes positions; the shape stays."""
    inputs = call["self"]
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    for dim in [dims] if isinstance(dims, int) else dims or range(len(inputs.shape)):
        fix(inputs.dims[dim], f"{call.name} runs over its channels")
    return with_dims(call, inputs.dims)


# Pointwise ----------------------------------------------------------------------------------------------------------


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "bernoulli")
@rule("hardswish", "log_sigmoid", "relu6", "mish", "rsub", "multiply", "divide", "subtract", "floor_divide")
@rule("copy", "fill", "zero", "contiguous", "to", "_to_copy", "alias", "detach", "lift_fresh_copy", "lift_fresh")
@rule("type_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def pointwise(call: Call) -> Result:
    """Unify the operands of an elementwise operation, with broadcasting: a product as a gate, any other as a sum."""
    name = call.name.removesuffix("_")
    relation = Relation.GATE if name in ("mul", "multiply", "div", "divide") else Relation.SUM
    dims = broadcast([value.dims for value in call.values], call.shape, relation)
    return with_dims(call, dims)


@rule("prelu")
def prelu(call: Call) -> Result:
    """Unify the slopes with the channels, unless there is only one."""
    inputs, weight = call["self"], call["weight"]
    if weight.shape and weight.shape[0] > 1:
        unify(weight.dims[0], inputs.dims[1])
    return Value(call.shape, inputs.dims)
