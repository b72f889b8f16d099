"""Replace operations that work in place by those that return a new tensor."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx
from torch._ops import OpOverload

from structured_ensembles.cuda.program import Node, Program, ProgramError

NORM = torch.ops.aten.batch_norm.default  # updates its running statistics, which programs allow
DROPOUT = torch.ops.aten.dropout.default
VIEW, RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default


def remove_inplace(program: Program) -> Program:
    """Rewrite `relu_(x)` as `relu(x)`, and let everything after it read the result in place of x; views as reshapes.

    Raises `ProgramError` where x shares memory with another tensor, or is a weight or buffer.
    """
    result = program.copy()
    weights = {node for node in result.nodes if node.op == "placeholder" and node.name not in result.inputs}
    for node in result.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target is NORM:
            continue
        mutated = [argument for argument in node.target._schema.arguments if _is_written(argument)]
        if not mutated:
            continue
        changed = node.args[0] if node.args else None
        functional = _functional(node.target)
        if functional is None or len(mutated) > 1 or not isinstance(changed, fx.Node):
            raise ProgramError(f"{node.target} works in place")
        if changed in weights:
            raise ProgramError(f"{node.target} changes {result.names.get(changed.name, changed.name)!r} in place")
        if _is_view(changed) or any(_is_view(user) for user in changed.users):
            raise ProgramError(f"{node.target} changes a tensor that shares its memory with another")
        node.target = functional
        changed.replace_all_uses_with(node, delete_user_cb=partial(_comes_before, node))
    # No operation writes to a view now; and strides are not those at export, so that a view may have to be a copy.
    for node in result.nodes:
        if node.target is VIEW:
            node.target = RESHAPE
    result.graph.lint()
    return result


def _functional(target: OpOverload) -> OpOverload | None:
    """Find the operation of the same name and overload without the underscore."""
    name, overload = target._schema.name.split("::")[1], target._overloadname
    packet = getattr(torch.ops.aten, name.rstrip("_"), None) if name.endswith("_") else None
    return getattr(packet, overload, None) if packet is not None else None


def _is_written(argument: torch.Argument) -> bool:
    """Tell whether an operation writes to an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(node: Node) -> bool:
    """Tell whether a node's value may share memory with its argument."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return node.op == "call_function" and node.target.__name__ == "getitem"  # type: ignore[union-attr]
    if node.target is DROPOUT and node.args[2] is False:
        return True  # it returns its argument
    returned = [value.alias_info for value in node.target._schema.returns if value.alias_info is not None]
    perhaps_views = ("aten::reshape", "aten::flatten", "aten::contiguous", "aten::to", "aten::chunk", "aten::split")
    return any(not alias.is_write for alias in returned) or node.target._schema.name in perhaps_views


def _comes_before(node: Node, user: Node) -> bool:
    """Tell whether a node stands before one of its users."""
    return node < user
