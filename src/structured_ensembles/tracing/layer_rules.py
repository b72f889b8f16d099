"""Rules for operations that compute: layers, norms, pointwise operations."""

from __future__ import annotations

from structured_ensembles.tracing.layout import (
    Layout,
    Relation,
    Value,
    fix,
    fixed_layout,
    mix,
    new_layout,
    product,
    unify,
)
from structured_ensembles.tracing.rules import Call, Result, broadcast, rule, with_dims

COMPUTED_WEIGHT = "read with a weight that is computed, not a parameter"

# Layers -------------------------------------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call) -> Result:
    """Unify input channels with the weight's, and give the output the weight's output channels.

    Of a grouped convolution, input and output channels are products: of the groups, which they share, and of the
    channels in each group. A channel in a group is kept or dropped in all groups alike.
    """
    inputs, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    transposed = "transpose" in call.name or call.arguments.get("transposed", False)
    channel = len(inputs.shape) - len(weight.shape) + 1
    read = inputs.dims[channel]
    if weight.parameter is None and not call.layers.is_derived(weight):
        fix(read, COMPUTED_WEIGHT)
    if groups == 1:
        read_dim, written_dim = (0, 1) if transposed else (1, 0)
        unify(weight.dims[read_dim], read)
        written = weight.dims[written_dim]
    else:
        written = _grouped_channels(call, read, weight, groups, transposed)
    if bias is not None:
        unify(bias.dims[0], written)
    if groups == 1 or groups != inputs.shape[channel] or transposed:  # a depthwise one only changes channels
        call.layers.consume(weight, read)
        call.layers.produce(weight, written, 1 if transposed else 0)
    for dim in inputs.dims[channel + 1 :]:
        fix(dim, "convolved over")
    spatial = map(fixed_layout, call.shape[channel + 1 :])
    return Value(call.shape, (*inputs.dims[:channel], written, *spatial))


def _grouped_channels(call: Call, read: Layout, weight: Value, groups: int, transposed: bool) -> Layout:
    """Unify the channels of a grouped convolution with products of groups and channels; return its output's."""
    group = new_layout(groups)
    rows = new_layout(weight.shape[0] // groups) if weight.shape[0] > groups else fixed_layout(1)
    outer, inner = product(group, rows), product(group, weight.dims[1])
    if outer is None or inner is None:  # the weight's channels consist of several pieces: they were used before
        for dim in (read, *weight.dims):
            fix(dim, "grouped convolution")
        return fixed_layout(weight.shape[1] * groups, "grouped convolution") if transposed else weight.dims[0]
    unify(weight.dims[0], outer)
    unify(outer if transposed else inner, read)
    call.expected["groups"] = lambda size: size(group)
    call.sizes["groups"] = group
    call.layers.attribute("groups", group)
    return inner if transposed else weight.dims[0]


@rule("linear")
def linear(call: Call) -> Result:
    """Unify input features with the weight's, and give the output the weight's output features."""
    inputs, weight, bias = call["input"], call["weight"], call["bias"]
    if weight.parameter is None and not call.layers.is_derived(weight):
        fix(inputs.dims[-1], COMPUTED_WEIGHT)
    unify(weight.dims[1], inputs.dims[-1])
    call.layers.consume(weight, inputs.dims[-1])
    if bias is not None:
        unify(bias.dims[0], weight.dims[0])
    call.layers.produce(weight, weight.dims[0], bare=True)
    return Value(call.shape, (*inputs.dims[:-1], weight.dims[0]))


@rule("embedding")
def embedding(call: Call) -> Result:
    """Give the output the features of the embedding; the tokens stay."""
    weight, indices = call["weight"], call["indices"]
    fix(weight.dims[0], "tokens of an embedding")
    call.layers.produce(weight, weight.dims[1], 1)
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
        mix(dim, f"{call.name} runs over it")
    return with_dims(call, inputs.dims)


@rule("layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> Result:
    """Mark the dimensions that a layer norm normalises over as mixed."""
    inputs, count = call["input"], len(call["normalized_shape"])
    normalized = inputs.dims[-count:]
    for dim in normalized:
        mix(dim, f"{call.name.replace('_', ' ')} mixes its channels")
    for argument in ("weight", "bias"):
        affine = call.arguments.get(argument)
        for affine_dim, dim in zip(affine.dims, normalized, strict=True) if affine is not None else ():
            unify(affine_dim, dim)
    call.expected["normalized_shape"] = lambda size: [size(dim) for dim in normalized]
    call.sizes["normalized_shape"] = list(normalized)
    return with_dims(call, inputs.dims)


@rule("group_norm")
def group_norm(call: Call) -> Result:
    """Unify the channels with a product of groups, of which each is normalised by itself, and mixed channels."""
    inputs, groups = call["input"], call["num_groups"]
    channels = inputs.dims[1]
    group = new_layout(groups) if groups > 1 else fixed_layout(1)
    members = new_layout(inputs.shape[1] // groups) if inputs.shape[1] > groups else fixed_layout(1)
    mix(members, "group norm mixes its channels")
    whole = product(group, members)
    assert whole is not None
    unify(channels, whole)
    for argument in ("weight", "bias"):
        if call.arguments.get(argument) is not None:
            unify(call[argument].dims[0], channels)
    for dim in inputs.dims[2:]:
        mix(dim, "group norm runs over it")
    call.expected["num_groups"] = lambda size: size(group)
    call.sizes["num_groups"] = group
    call.layers.attribute("num_groups", group)
    return with_dims(call, inputs.dims)


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
@rule("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_or")
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
