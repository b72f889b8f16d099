"""Fuse batch norms, in training or in prediction, with the sum and the ReLU that follow them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from structured_ensembles.cuda.operations import member_norm, running_norm
from structured_ensembles.cuda.program import Node, Program, is_tensor, shape_of

NORM, ADD, RELU = torch.ops.aten.batch_norm.default, torch.ops.aten.add.Tensor, torch.ops.aten.relu.default


def fuse_norms(program: Program) -> Program:
    """Rewrite batch norms in training, on images, as `member_norm`, with the sum and the ReLU that follow them."""
    result = program.copy()
    for node in result.nodes:
        if node.op == "call_function" and node.target is NORM and _can_be_fused(node, result):
            momentum, eps = node.args[6:8]
            fuse_sum_and_relu(node, result.graph, member_norm, node.args[:5], {"momentum": momentum, "eps": eps})
    result.graph.lint()
    return result


def fuse_running_norms(program: Program) -> Program:
    """Rewrite batch norms in evaluation mode as `running_norm`, with the sum and the ReLU that follow them."""
    result = program.copy()
    for node in result.nodes:
        if node.op == "call_function" and node.target is NORM and node.args[5] is False:
            weights = node.args[1:5]
            if all(weight is None or weight.name in result.names for weight in weights) and None not in weights[2:]:
                fuse_sum_and_relu(node, result.graph, running_norm, node.args[:5], {"eps": node.args[7]})
    result.graph.lint()
    return result


def _can_be_fused(node: Node, program: Program) -> bool:
    """Tell whether a batch norm is in training, has parameters and running statistics, and normalises images."""
    x, weight, bias, mean, var, training, *_ = node.args
    tensors = (weight, bias, mean, var)
    return (
        training is True
        and all(isinstance(tensor, fx.Node) and tensor.name in program.names for tensor in tensors)
        and len(shape_of(x)) == 4  # type: ignore[arg-type]
    )


def fuse_sum_and_relu(node: Node, graph: fx.Graph, target: Any, tensors: Any, options: dict[str, Any]) -> None:
    """Replace a node, and the sum and ReLU that alone read it, by `target(*tensors, other, **options, relu=…)`.

    other: what is added, where something is.
    """
    last, other = node, None
    addition = _only_user(last)
    if addition is not None and addition.target is ADD and not addition.kwargs and len(addition.args) == 2:
        others = [argument for argument in addition.args if argument is not last]
        if len(others) == 1 and is_tensor(others[0]) and shape_of(others[0]) == shape_of(last):
            last, other = addition, others[0]
    rectifier = _only_user(last)
    relu = rectifier is not None and rectifier.target is RELU
    if relu:
        assert rectifier is not None
        last = rectifier
    with graph.inserting_before(last):
        arguments = (*tensors,) if other is None else (*tensors, other)
        fused = graph.call_function(target, arguments, {**options, "relu": relu})
    fused.meta = dict(last.meta)
    last.replace_all_uses_with(fused)
    while last is not node:
        before = next(argument for argument in last.args if argument is not other and isinstance(argument, fx.Node))
        graph.erase_node(last)
        last = before
    graph.erase_node(node)


def _only_user(node: Node) -> Node | None:
    """Return the node that reads a value; None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None
