"""Look up facts of an exported graph's nodes: module, shapes, operation, and what comes after them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

MOST_TRIES = 1000  # values of a size that depends on data


def module_of(node: fx.Node) -> str:
    """Return the qualified name of the module whose forward contains the operation."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def shapes_of(node: fx.Node) -> list[tuple[int, ...] | None]:
    """List the shapes of a node's results; None for one that is not a tensor.

    A size that depends on data, such as the number of positions that a mask picks, is the largest that it can be.
    """
    return [tuple(map(largest, item.shape)) if isinstance(item, Tensor) else None for item in _results_of(node)]


def has_data_dependent_shape(node: fx.Node) -> bool:
    """Tell whether a size of a node's results, or a number that it results in, depends on data."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    shapes = (item.shape if isinstance(item, Tensor) else (item,) for item in _results_of(node))
    return any(isinstance(size, symbols) for shape in shapes for size in shape)


def _results_of(node: fx.Node) -> list[Any]:
    """List the fake tensors, and other values, that a node results in."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def largest(size: int | torch.SymInt) -> int:
    """Return the largest value of a size; an error if it depends on data and has no bound."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    values = {symbol: _largest_value(size.node.shape_env, symbol) for symbol in expression.free_symbols}
    value = expression.xreplace(values)
    return int(value) if value.is_Integer else int(size)  # the second raises what PyTorch says about such sizes


@lru_cache(maxsize=16)
def _largest_value(environment: ShapeEnv, symbol: Any) -> Any:
    """Return the largest value of a symbol with which an export's assertions hold, or the end of its range."""
    bounds = environment.var_to_range[symbol]
    if not bounds.upper.is_Integer:
        return symbol
    assertions = [item.expr for item in environment.deferred_runtime_asserts.get(symbol, ())]
    lowest = max(bounds.lower, bounds.upper - MOST_TRIES)
    values = (bounds.upper - less for less in range(int(bounds.upper - lowest) + 1))
    possible = (value for value in values if all(item.xreplace({symbol: value}) != False for item in assertions))  # noqa: E712 (SymPy's)
    return next(possible, bounds.upper)


def operation_name(node: fx.Node) -> str:
    """Return the name of an ATen operation without its namespace; "" for any other node."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else schema.name.rpartition("::")[2]


def declared_results(node: fx.Node) -> list[Any]:
    """List the declared results of an operation."""
    schema = getattr(node.target, "_schema", None)
    return list(schema.returns) if schema is not None else [None]


def is_list(node: fx.Node) -> bool:
    """Tell whether a node's result is a list or tuple."""
    return isinstance(node.meta.get("val"), list | tuple)


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that the output depends on, and those that change a tensor, with all that they read."""
    live: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        schema = getattr(node.target, "_schema", None)
        if node.op in ("placeholder", "output") or node in live or (schema is not None and schema.is_mutable):
            live.add(node)
            live.update(node.all_input_nodes)
    return live


def reads_only_shape(user: fx.Node, node: fx.Node) -> bool:
    """Tell whether an operation needs only the shape or type of a node, such as the second argument of view_as."""
    return operation_name(user) in ("view_as", "reshape_as", "expand_as", "type_as") and user.args[0] is not node


def small_constant(constant: Any) -> Any:
    """Return the values of a small constant tensor, which may hold a number of channels; None for any other."""
    if not isinstance(constant, Tensor) or isinstance(constant, FakeTensor) or constant.numel() > 16:
        return None
    return constant.tolist()


POINTWISE = frozenset(
    [
        *("relu", "relu_", "gelu", "silu", "silu_", "leaky_relu", "leaky_relu_", "elu", "elu_", "sigmoid", "tanh"),
        *("hardtanh", "hardtanh_", "hardswish", "hardswish_", "softplus", "mish", "add", "add_", "sub", "mul", "mul_"),
        *("div", "dropout", "dropout_", "to", "_to_copy", "clone", "contiguous", "alias", "detach"),
    ]
)


def extra_operation(node: fx.Node) -> str | None:
    """Return an operation by which a layer's forward changes its output otherwise than elementwise; None if none."""
    for user in node.users:
        if user.op == "call_function" and module_of(user) == module_of(node):
            name = operation_name(user) or str(user.target)
            if name not in POINTWISE or shapes_of(user) != shapes_of(node):
                return name
            operation = extra_operation(user)
            if operation is not None:
                return operation
    return None


def norm_after(node: fx.Node) -> str | None:
    """Return the name of the batch norm that reads the output of `node`, if nothing else does."""
    users = list(node.users)
    if len(users) != 1:
        return None
    return module_of(users[0]) if "batch_norm" in operation_name(users[0]) else None


# Substrings of the names of operations

NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")

PRODUCTS = ("linear", "conv", "addmm", "bmm", "matmul", "einsum", "scaled_dot_product")


def feeds_layer_inside(node: fx.Node) -> bool:
    """Tell whether a layer inside of the module of `node` reads the output of `node`, on any path."""
    module, remaining, seen = module_of(node), list(node.users), set()
    while remaining:
        user = remaining.pop()
        if user in seen or not (module == "" or f"{module_of(user)}.".startswith(f"{module}.")):
            continue
        if module_of(user) != module and any(product in operation_name(user) for product in PRODUCTS):
            return True
        seen.add(user)
        remaining += user.users
    return False


def is_normalized(node: fx.Node) -> bool:
    """Tell whether every path from `node` to the next layer, or to the output, passes a norm layer."""
    remaining, seen = list(node.users), set()
    while remaining:
        user = remaining.pop()
        name = operation_name(user)
        if user in seen or any(norm in name for norm in NORMS):
            continue
        if user.op == "output" or any(product in name for product in PRODUCTS):
            return False
        seen.add(user)
        remaining += user.users
    return True
