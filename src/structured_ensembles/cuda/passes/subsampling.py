"""Fuse the shortcut of a residual network without parameters: every second pixel, and channels of zeros appended."""

from __future__ import annotations

import torch

from structured_ensembles.cuda.operations import subsample
from structured_ensembles.cuda.program import Node, Program, shape_of

POOL, PAD = torch.ops.aten.avg_pool2d.default, torch.ops.aten.pad.default


def fuse_subsampling(program: Program) -> Program:
    """Rewrite `pad(avg_pool2d(x, 1, stride))` as `subsample(x)`; also either of them alone."""
    result = program.copy()
    for node in result.nodes:
        if node.op == "call_function" and node.target is POOL and _stride(node) is not None:
            x, last, channels = node.args[0], node, shape_of(node)[1]
            user = next(iter(node.users)) if len(node.users) == 1 else None
            if user is not None and _appended(user) is not None:
                last, channels = user, channels + _appended(user)
            with result.graph.inserting_before(last):
                fused = result.graph.call_function(subsample, (x, _stride(node), channels))
            fused.meta = dict(last.meta)
            last.replace_all_uses_with(fused)
            result.graph.erase_node(last)
            if last is not node:
                result.graph.erase_node(node)
    result.graph.lint()
    return result


def _stride(node: Node) -> int | None:
    """Return the stride of a pooling over single pixels; None for others."""
    _, window, stride, *rest = (*node.args, [], [])[: max(3, len(node.args))]
    plain = list(window) == [1, 1] and not rest and not node.kwargs and len(shape_of(node)) == 4
    return stride[0] if plain and len(stride) == 2 and stride[0] == stride[1] else None


def _appended(node: Node) -> int | None:
    """Return how many channels of zeros a padding appends; None for others."""
    if node.target is not PAD or node.kwargs or len(node.args) != 2 or len(shape_of(node)) != 4:
        return None
    amounts = list(node.args[1])
    return amounts[5] if amounts[:5] == [0] * 5 and len(amounts) == 6 and amounts[5] >= 0 else None
