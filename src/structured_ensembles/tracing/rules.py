"""Rules: what an operation does to layouts. One without a rule fixes every channel it touches: we never guess.

A rule is a function of a `Call` that returns the layouts of the operation's result (one `Value`, or a list of them). It
unifies the dimensions that must hold the same channels, and fixes the ones that it mixes. The rules themselves are in
`layer_rules.py` (what computes) and `shape_rules.py` (what only moves and combines).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from structured_ensembles.tracing.layout import How, Layout, Value, extent, fix, plain, unify

Result = Value | list[Value | None] | None
Expected = Callable[[Callable[[Layout], int]], Any]


class Layers(Protocol):
    """What rules report besides layouts: which layer computes channels, and which reads them."""

    def produce(self, weight: Value, channels: Layout) -> None: ...
    def consume(self, weight: Value, channels: Layout) -> None: ...


@dataclass
class Call:
    """One operation of the graph with its arguments by name."""

    name: str
    arguments: dict[str, Any]
    shapes: list[tuple[int, ...] | None]  # of its results
    layers: Layers
    apply: Callable[..., Any]
    # What the trial must find for an argument that holds channel counts: a function of the dimensions' new sizes, or
    # None where the shape of the result says it all. Every other argument must not change.
    expected: dict[str, Expected | None] = field(default_factory=dict)

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.shapes[0]
        assert shape is not None
        return shape

    def dim(self, argument: str = "dim", of: str = "self") -> int:
        rank = len(self[of].shape)
        return int(self[argument]) % max(rank, 1)

    @property
    def values(self) -> list[Value]:
        """Its tensor arguments, those in lists included."""
        found = []
        for argument in self.arguments.values():
            items = argument if isinstance(argument, list | tuple) else [argument]
            found += [item for item in items if isinstance(item, Value)]
        return found


Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def unknown(call: Call, reason: str) -> Result:
    for value in call.values:
        for dim in value.dims:
            fix(dim, reason)
    return [None if shape is None else Value(shape, tuple(plain(n, reason) for n in shape)) for shape in call.shapes]


def first_of(call: Call, dims: Sequence[Layout]) -> Result:
    """The result's first tensor has these layouts, and so have others of its shape (indices of maxima)."""
    others: list[Value | None] = []
    for shape in call.shapes[1:]:
        same = tuple(dims) if shape == call.shape else tuple(map(plain, shape or ()))
        others.append(None if shape is None else Value(shape, same))
    return [Value(call.shape, tuple(dims)), *others]


def broadcast(operands: Sequence[Sequence[Layout]], shape: Sequence[int], how: How) -> list[Layout]:
    """The layouts of a broadcast result of `shape`; operands are aligned at their last dimension."""
    result: list[Layout] = []
    for position, size in enumerate(shape):
        meeting = []
        for dims in operands:
            own = position - len(shape) + len(dims)
            if own >= 0 and extent(dims[own]) == size > 1:
                meeting.append(dims[own])
        for other in meeting[1:]:
            unify(meeting[0], other, how)
        result.append(meeting[0] if meeting else plain(size))
    return result
