"""Let a program scale the outputs of layers, each member's by factors of its own; all members share the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from structured_ensembles.common.member_rows import scale_rows
from structured_ensembles.cuda.operations import member_conv, scaled_conv
from structured_ensembles.cuda.program import Node, Program, ProgramError

CHANNELS = -3  # the dimension of an image's channels


def add_scales(program: Program, layers: Mapping[str, int]) -> Program:
    """Multiply the outputs of layers with factors, for which the program gets new placeholders.

    layers: for the name of each layer, the dimension of its channels, counted from the end. Rows of the batch are
    grouped by member. Raises `ProgramError` for a layer without a weight of its own, such as a recurrent one.
    """
    result = program.copy()
    graph = result.graph
    placeholders = [node for node in result.nodes if node.op == "placeholder"]
    weights = {result.names[node.name]: node for node in placeholders if node.name in result.names}
    last, factors = placeholders[-1], {}
    for number, (layer, dim) in enumerate(layers.items()):
        weight = weights.get(f"{layer}.weight")
        if weight is None:
            raise ProgramError(f"{layer!r} has no weight of its own, by which its outputs are found")
        with graph.inserting_after(last):
            last = graph.placeholder(f"factors_{number}")
        factors[last.name] = layer
        for user in list(weight.users):
            _scale(graph, user, last, dim)
    graph.lint()
    return replace(result, factors=factors)


def fuse_scales(program: Program) -> Program:
    """Rewrite `scale_rows(member_conv(x))` as `scaled_conv(x)`; what `add_scales` scales has no other reader."""
    result = program.copy()
    for node in result.nodes:
        if node.op != "call_function" or node.target is not scale_rows:
            continue
        conv, factors, dim = node.args
        if conv.target is not member_conv or dim != CHANNELS:
            continue
        x, weight, *bias = conv.args
        with result.graph.inserting_before(node):
            arguments = (x, weight, bias[0] if bias else None, factors)
            fused = result.graph.call_function(scaled_conv, arguments, dict(conv.kwargs))
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        result.graph.erase_node(node)
        result.graph.erase_node(conv)
    result.graph.lint()
    return result


def _scale(graph: fx.Graph, node: Node, factors: Node, dim: int) -> None:
    """Let all readers of a node read its value scaled."""
    readers = list(node.users)
    with graph.inserting_after(node):
        scaled = graph.call_function(scale_rows, (node, factors, dim))
    scaled.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, scaled)
