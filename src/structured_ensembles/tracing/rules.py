"""Interface of rules: functions that say what an operation does to layouts.

A rule is a function of a `Call` that returns the layouts of the operation's result (one `Value`, or a list of them). It
unifies the dimensions that must hold the same channels, and fixes those that the operation mixes. An operation without
a rule fixes every channel that it touches. The rules are in `layer_rules.py` and `shape_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from structured_ensembles.tracing.layout import Layout, Relation, Value, extent, fix, fixed_layout, unify

Result = Value | list[Value | None] | None
Expected = Callable[[Callable[[Layout], int]], Any]


class Layers(Protocol):
    """Receiver of what rules report besides layouts: which layer computes channels, and which reads them."""

    def produce(self, weight: Value, channels: Layout, dim: int = 0, bare: bool = False) -> None: ...
    def consume(self, weight: Value, channels: Layout) -> None: ...
    def is_derived(self, weight: Value) -> bool: ...
    def multiply(self, channels: Layout) -> None: ...
    def attribute(self, name: str, size: Layout) -> None: ...


@dataclass
class Call:
    """One operation of the graph with its arguments by name."""

    name: str
    arguments: dict[str, Any]
    shapes: list[tuple[int, ...] | None]  # of its results
    layers: Layers
    apply: Callable[..., Any]
    # The values that arguments with channel counts must have in the trial: a function of the dimensions' new sizes, or
    # None if checking the shape of the result is enough. All other arguments must not change.
    expected: dict[str, Expected | None] = field(default_factory=dict)
    # The arguments with sizes, for a graph that is cut: each a layout, whose extent it is, or a list of layouts and
    # numbers. `replacement`: another operation, which has arguments for them.
    sizes: dict[str, Any] = field(default_factory=dict)
    replacement: Any = None
    data_dependent: bool = False  # whether a size of its results depends on data

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the first result."""
        shape = self.shapes[0]
        assert shape is not None
        return shape

    def dim(self, argument: str = "dim", tensor: str = "self") -> int:
        """Return a dimension argument as an index from 0 on, even if it counts from the end."""
        rank = len(self[tensor].shape)
        return int(self[argument]) % max(rank, 1)

    @property
    def values(self) -> list[Value]:
        """List the tensor arguments, those in lists included."""
        tensors: list[Value] = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            tensors += [item for item in items if isinstance(item, Value)]
        return tensors


Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule for the operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def fix_unknown(call: Call, reason: str) -> Result:
    """Fix all channels that an operation without a rule touches."""
    for value in call.values:
        for dim in value.dims:
            fix(dim, reason)
    return [
        None if shape is None else Value(shape, tuple(fixed_layout(n, reason) for n in shape)) for shape in call.shapes
    ]


def with_dims(call: Call, dims: Sequence[Layout]) -> Result:
    """Return results with these layouts: the first one, and others of its shape, such as the indices of maxima."""
    others: list[Value | None] = []
    for shape in call.shapes[1:]:
        layouts = tuple(dims) if shape == call.shape else tuple(map(fixed_layout, shape or ()))
        others.append(None if shape is None else Value(shape, layouts))
    return [Value(call.shape, tuple(dims)), *others]


def broadcast(operands: Sequence[Sequence[Layout]], shape: Sequence[int], relation: Relation) -> list[Layout]:
    """Unify operands that are broadcast to `shape`, aligned at their last dimension; return the result's layouts."""
    result: list[Layout] = []
    for position, size in enumerate(shape):
        aligned = []
        for dims in operands:
            dim = position - len(shape) + len(dims)
            if dim >= 0 and extent(dims[dim]) == size > 1:
                aligned.append(dims[dim])
        for other in aligned[1:]:
            unify(aligned[0], other, relation)
        result.append(aligned[0] if aligned else fixed_layout(size))
    return result
