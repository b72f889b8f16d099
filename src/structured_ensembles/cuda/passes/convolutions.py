"""Fuse convolutions with the batch norm that follows: the convolution computes the moments of its outputs."""

from __future__ import annotations

from torch import fx

from structured_ensembles.cuda.operations import conv_norm, member_conv, member_norm
from structured_ensembles.cuda.program import Program


def fuse_convolutions(program: Program) -> Program:
    """Rewrite `member_norm(member_conv(x))` as `conv_norm(x)`, where nothing else reads the convolution."""
    result = program.copy()
    for node in result.nodes:
        if node.op != "call_function" or node.target is not member_norm:
            continue
        conv = node.args[0]
        if not isinstance(conv, fx.Node) or conv.target is not member_conv or len(conv.users) > 1:
            continue
        if conv in node.args[1:]:  # added to its own norm
            continue
        if len(conv.args) > 2 and conv.args[2] is not None:  # a bias, for which there is no fused kernel
            continue
        x, weight = conv.args[:2]
        with result.graph.inserting_before(node):
            fused = result.graph.call_function(conv_norm, (x, weight, *node.args[1:]), {**conv.kwargs, **node.kwargs})
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        result.graph.erase_node(node)
        result.graph.erase_node(conv)
    result.graph.lint()
    return result
