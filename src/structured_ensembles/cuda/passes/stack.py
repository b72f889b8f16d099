"""Let a program compute several members at a time: their samples are one batch, their weights are stacked."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt

from structured_ensembles.cuda.operations import (
    conv_norm,
    member_conv,
    member_dropout,
    member_linear,
    member_norm,
    predict_conv,
    running_norm,
    subsample,
)
from structured_ensembles.cuda.program import Node, Program, ProgramError, is_tensor, shape_of

aten = torch.ops.aten
OURS = {
    conv_norm, member_conv, member_dropout, member_linear, member_norm, predict_conv, running_norm, subsample,
}  # fmt: skip
SAMPLE_BY_SAMPLE: set[Any] = {
    aten.relu.default, aten.relu6.default, aten.silu.default, aten.gelu.default, aten.sigmoid.default,
    aten.tanh.default, aten.hardtanh.default, aten.hardswish.default, aten.hardsigmoid.default, aten.elu.default,
    aten.leaky_relu.default, aten.mish.default, aten.softplus.default, aten.celu.default, aten.selu.default,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.exp.default,
    aten.abs.default, aten.sqrt.default, aten.pow.Tensor_Scalar, aten.clamp.default, aten.clone.default,
    aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default, aten.contiguous.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
}  # fmt: skip
# Operations that take dimensions, and the position of these among their arguments.
BY_DIMENSION: dict[Any, int] = {
    aten.mean.dim: 1, aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.softmax.int: 1, aten.log_softmax.int: 1,
    aten.cat.default: 1, aten.slice.Tensor: 1, aten.select.int: 1, aten.unsqueeze.default: 1, aten.squeeze.dim: 1,
    aten.flatten.using_ints: 1, aten.chunk.default: 2, aten.split.Tensor: 2, aten.transpose.int: 1,
}  # fmt: skip
SHAPES = {aten.view.default, aten.reshape.default}
SIZES = {aten.sym_size.int, operator.mul, operator.add, operator.floordiv, operator.getitem}


def stack_members(program: Program, members: int) -> Program:
    """Return the program of so many members, whose samples are one batch: (members × samples, …).

    All operations but ours must compute each sample on its own, and take no weights. Raises `ProgramError` for the
    first that does not, or of which that is not known.
    """
    if members == 1:
        return program
    for node in program.nodes:
        if node.op == "call_function" and node.target not in OURS:
            _check(node, program)
    first = shape_of(program.output)[:1]
    if not first or not isinstance(first[0], SymInt):
        raise ProgramError("the first dimension of the network's output is not the batch")
    return replace(program.copy(), members=members)


def _check(node: Node, program: Program) -> None:
    """Raise `ProgramError` unless a node computes each sample on its own."""
    name = f"{node.target}"
    for argument in node.all_input_nodes:
        if argument.op == "placeholder" and argument.name not in program.inputs:
            raise ProgramError(
                f"{name} uses {program.names.get(argument.name, argument.name)!r}, which members differ in"
            )
        if is_tensor(argument) and not _has_batch(argument):
            raise ProgramError(f"{name} reads a tensor whose first dimension is not the batch")
    if node.target in SAMPLE_BY_SAMPLE or node.target in SIZES:
        pass
    elif node.target is aten.pad.default:
        if len(node.args[1]) >= 2 * len(shape_of(node.args[0])):  # type: ignore[arg-type]
            raise ProgramError(f"{name} works on the batch dimension")
    elif node.target in BY_DIMENSION:
        _check_dimensions(node)
    elif node.target in SHAPES:
        pass  # the result must have the batch first, and as many samples: checked below
    else:
        raise ProgramError(f"{name} is not known to compute sample by sample")
    if is_tensor(node) and not _same_batch(node, program):
        raise ProgramError(f"{name} changes the batch dimension")


def _check_dimensions(node: Node) -> None:
    """Raise `ProgramError` if an operation that takes dimensions works on the first, the batch."""
    place = BY_DIMENSION[node.target]
    dims = node.args[place] if len(node.args) > place else 0
    listed = [*dims] if isinstance(dims, list | tuple) else [dims]
    if node.target is aten.transpose.int:
        listed = [*node.args[1:3]]
    tensor = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    rank = len(shape_of(tensor)) + (node.target is aten.unsqueeze.default)
    if not listed or any(not isinstance(dim, int) or dim % rank == 0 for dim in listed):
        raise ProgramError(f"{node.target} works on the batch dimension")


def _has_batch(node: Node) -> bool:
    """Tell whether a tensor's first dimension is a number of samples."""
    shape = shape_of(node)
    return bool(shape) and isinstance(shape[0], SymInt)


def _same_batch(node: Node, program: Program) -> bool:
    """Tell whether the first dimension, and no other, is the batch of the inputs."""
    first = next(placeholder for placeholder in program.nodes if placeholder.name == program.inputs[0])
    shape = shape_of(node)
    return (
        bool(shape)
        and str(shape[0]) == str(shape_of(first)[0])
        and not any(isinstance(size, SymInt) for size in shape[1:])
    )
