"""Passes of programs for prediction: convolutions that finish their outputs, and inputs that all members share."""

from __future__ import annotations

from torch import fx

from structured_ensembles.cuda.operations import member_conv, predict_conv, repeat_members, running_norm
from structured_ensembles.cuda.passes.norms import fuse_sum_and_relu
from structured_ensembles.cuda.program import Program


def fuse_predictions(program: Program) -> Program:
    """Rewrite convolutions as `predict_conv`, with the batch norm, or the sum and the ReLU, that alone read them."""
    result = program.copy()
    for node in result.nodes:
        if node.op != "call_function" or node.target is not member_conv:
            continue
        x, weight, *rest = node.args
        bias = rest[0] if rest else None
        norm = next(iter(node.users)) if len(node.users) == 1 else None
        if norm is None or norm.target is not running_norm or node in norm.args[1:]:
            arguments = (x, weight, bias, None, None, None, None)
            fuse_sum_and_relu(node, result.graph, predict_conv, arguments, dict(node.kwargs))
            continue
        with result.graph.inserting_before(norm):
            fused = result.graph.call_function(
                predict_conv, (x, weight, bias, *norm.args[1:]), {**node.kwargs, **norm.kwargs}
            )
        fused.meta = dict(norm.meta)
        norm.replace_all_uses_with(fused)
        result.graph.erase_node(norm)
        result.graph.erase_node(node)
    result.graph.lint()
    return result


def share_inputs(program: Program) -> Program:
    """Let all members read one batch: convolutions as it is, all else (also its size) a copy for each member."""
    result = program.copy()
    for node in [node for node in result.nodes if node.name in result.inputs]:
        others = [user for user in node.users if not _reads_directly(user, node)]
        for user in list(node.users):
            if user not in others:
                user.kwargs = {**user.kwargs, "shared": True}
        if others:
            with result.graph.inserting_after(node):
                repeated = result.graph.call_function(repeat_members, (node, program.members))
            repeated.meta = dict(node.meta)
            node.replace_all_uses_with(repeated, lambda user, others=others: user in others)  # type: ignore[misc]
    result.graph.lint()
    return result


def _reads_directly(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether a node is a convolution of an input, and does not read it in another way too."""
    return user.target is predict_conv and user.args[0] is node and node not in user.args[1:]
