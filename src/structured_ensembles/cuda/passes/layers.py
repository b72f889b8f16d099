"""Replace convolutions, linear layers and dropout by operations that have the member as an axis of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from structured_ensembles.cuda.operations import member_conv, member_dropout, member_linear
from structured_ensembles.cuda.program import Node, Program

CONV, LINEAR, DROPOUT = torch.ops.aten.conv2d.default, torch.ops.aten.linear.default, torch.ops.aten.dropout.default


def replace_layers(program: Program) -> Program:
    """Rewrite convolutions with square windows and no groups as `member_conv`, linear layers as `member_linear`."""
    result = program.copy()
    for node in result.nodes:
        if node.op != "call_function":
            continue
        if node.target is LINEAR and _has_own_weights(node, result):
            _replace(result.graph, node, member_linear, node.args, {})
        if node.target is CONV and _has_own_weights(node, result):
            window = _window(*node.args[3:])
            if window is not None:
                _replace(result.graph, node, member_conv, node.args[:3], window)
    result.graph.lint()
    return result


def replace_dropout(program: Program) -> Program:
    """Rewrite dropout as `member_dropout`, whose masks come from the members' own generators."""
    result = program.copy()
    for node in result.nodes:
        if node.op == "call_function" and node.target is DROPOUT:
            x, p, training = node.args
            if p and training:
                _replace(result.graph, node, member_dropout, (x, "generators", p), {})
            else:  # it does nothing
                node.replace_all_uses_with(x)
                result.graph.erase_node(node)
    result.graph.lint()
    return result


def _has_own_weights(node: Node, program: Program) -> bool:
    """Tell whether weight and bias are parameters of the network, not computed ones."""
    weights = node.args[1:3]
    return all(weight is None or (isinstance(weight, fx.Node) and weight.name in program.names) for weight in weights)


def _window(
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1
) -> dict[str, int] | None:
    """Return stride and padding if they are the same in both directions, without dilation and groups; else None."""
    plain = groups == 1 and tuple(dilation) == (1, 1) and len(set(stride)) == 1 and len(set(padding)) == 1
    return {"stride": stride[0], "padding": padding[0]} if plain else None


def _replace(graph: fx.Graph, node: Node, target: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Replace a node by a call of `target`."""
    with graph.inserting_before(node):
        new = graph.call_function(target, tuple(args), kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
