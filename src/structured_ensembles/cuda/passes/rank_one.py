"""Let a program compute members that share their weights but for rank-one factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from structured_ensembles.cuda.operations import (
    add_member_bias,
    member_conv,
    member_linear,
    rank_one_weights,
    repeat_members,
    split_members,
)
from structured_ensembles.cuda.program import Node, Program, ProgramError


def add_factors(program: Program, layers: Sequence[str], members: int) -> Program:
    """Rewrite the convolutions and linear layers of these names: their weights become those of so many members.

    Inputs are repeated for each member, and the output is cut up, (members, samples, …). All members' weights are
    computed at the beginning: so in the backward pass their gradients are complete at the end, when those of the
    factors are computed from them. Raises `ProgramError` where a weight is used by another operation.
    """
    result = program.copy()
    graph = result.graph
    placeholders = [node for node in result.nodes if node.op == "placeholder"]
    by_name = {result.names[node.name]: node for node in placeholders if node.name in result.names}
    last = placeholders[-1]
    for layer in layers:
        weight = by_name.get(f"{layer}.weight")
        if weight is None:
            raise ProgramError(f"{layer!r} shares its weight with another layer")
        users = list(weight.users)
        if not users:
            continue
        _check_users(layer, weight, users)
        factors = (by_name[f"{layer}.input_factors"], by_name[f"{layer}.output_factors"])
        last = _insert_after(graph, last, rank_one_weights, (weight, *factors))
        for user in users:
            user.args = (user.args[0], last)
            if f"{layer}.biases" in by_name:
                _append(graph, user, add_member_bias, by_name[f"{layer}.biases"])
    for node in placeholders:
        if node.name in result.inputs and node.users:
            users = list(node.users)
            last = _insert_after(graph, last, repeat_members, (node, members))
            for user in users:
                user.replace_input_with(node, last)
    _append(graph, result.output, split_members, members)
    graph.lint()
    return result


def _check_users(layer: str, weight: Node, users: Sequence[Node]) -> None:
    """Raise `ProgramError` unless a weight is only used as that of convolutions and linear layers without bias."""
    for user in users:
        if user.target not in (member_conv, member_linear) or weight is user.args[0] or set(user.args[2:]) - {None}:
            raise ProgramError(f"{layer!r} is not a layer whose factors a program can have")


def _insert_after(graph: fx.Graph, node: Node, target: Any, arguments: tuple[Any, ...]) -> Node:
    """Insert a call after a node."""
    with graph.inserting_after(node):
        return graph.call_function(target, arguments)


def _append(graph: fx.Graph, node: Node, target: Any, *arguments: Any) -> None:
    """Let all readers of a node read `target(node, *arguments)`."""
    readers = list(node.users)
    new = _insert_after(graph, node, target, (node, *arguments))
    new.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, new)
