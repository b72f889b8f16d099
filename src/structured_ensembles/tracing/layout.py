"""Layouts: which channels lie along a dimension, and the algebra that finds out which channels are the same.

A *channel set* is a number of channels, each of which is kept or dropped wherever it appears. Sets are the nodes of a
union-find structure: two sets that turn out to be the same channels are merged; a set that turns out to be a sequence
of others (a concatenation, or a flattened feature map) is *defined* as a layout of them.

A *layout* is the content of one dimension: a sequence of runs, each the channels of one set with `block` consecutive
positions per channel. A convolution's output has the layout ((set, 1),) in dimension 1; flattening (channels, height,
width) gives ((set, height * width),); concatenation joins layouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Relation(Enum):
    """Why two channel sets are the same: decides whether they are coupled, and whose output a scaling vector scales."""

    SUM = "sum"  # a residual sum, or any other elementwise operation of two layers' outputs: every producer is scaled
    GATE = "gate"  # a product: scaling the first factor scales it
    SAME = "same"  # a parameter along channels, or the same channels met twice


@dataclass(eq=False)
class ChannelSet:
    """A node of the union-find structure; `find` returns its root."""

    size: int
    fixed: str | None = None  # why no channel can be removed
    coupled: bool = False  # merged with another layer's output by a residual sum
    padding: bool = False  # constants that an operation appended: no layer computes them
    heads: frozenset[int] = frozenset()  # the producers that a scaling vector scales, by number
    parent: ChannelSet | None = None
    definition: Layout | None = None  # the sets that it consists of, if it is defined by them


class Run(NamedTuple):
    """The channels of one set along a dimension."""

    channels: ChannelSet
    block: int  # consecutive positions per channel

    @property
    def extent(self) -> int:
        """Return the number of positions."""
        return self.channels.size * self.block


Layout = tuple[Run, ...]


@dataclass
class Value:
    """A tensor of the traced graph: its shape, and the layout of each dimension."""

    shape: tuple[int, ...]
    dims: tuple[Layout, ...]
    parameter: str | None = field(default=None)  # its name, if the value is a parameter or buffer

    def __post_init__(self) -> None:
        assert tuple(extent(dim) for dim in self.dims) == self.shape, (self.shape, self.dims)


def new_layout(size: int, **properties: object) -> Layout:
    """Make a layout of one new channel set."""
    return (Run(ChannelSet(size, **properties), 1),)  # type: ignore[arg-type]


def fixed_layout(size: int, reason: str = "not a dimension of channels") -> Layout:
    """Make a layout from which nothing can be removed, such as that of the batch dimension."""
    return new_layout(size, fixed=reason)


def extent(layout: Layout) -> int:
    """Return the number of positions of a layout."""
    return sum(run.extent for run in layout)


def repeat_positions(layout: Layout, factor: int) -> Layout:
    """Replace every position by `factor` consecutive ones."""
    return tuple(Run(run.channels, run.block * factor) for run in layout)


def find(channels: ChannelSet) -> ChannelSet:
    """Return the root of a set: the set that it was merged into, or itself."""
    root = channels
    while root.parent is not None:
        root = root.parent
    while channels.parent is not None:  # path compression keeps tracing linear
        channels.parent, channels = root, channels.parent
    return root


def resolve(layout: Layout) -> Layout:
    """Rewrite a layout in terms of roots without a definition."""
    resolved: list[Run] = []
    remaining = deque(layout)
    while remaining:
        run = _resolve_first(remaining)
        remaining.popleft()
        resolved.append(run)
    return tuple(resolved)


def channel_sets(layout: Layout) -> list[ChannelSet]:
    """List the distinct channel sets of a layout, in order."""
    return list(dict.fromkeys(run.channels for run in resolve(layout)))


def is_fixed(layout: Layout) -> bool:
    """Tell whether no channel of a layout can be removed."""
    return all(channels.fixed for channels in channel_sets(layout))


def fix(layout: Layout, reason: str) -> None:
    """Mark the channels of a layout as not removable; the first reason stays."""
    for channels in channel_sets(layout):
        channels.fixed = channels.fixed or reason


def unify(left: Layout, right: Layout, relation: Relation = Relation.SAME) -> None:
    """Record that two dimensions of equal extent hold the same channels, position by position."""
    assert extent(left) == extent(right), (left, right)
    left_runs, right_runs = deque(left), deque(right)
    while left_runs:
        one, other = _resolve_first(left_runs), _resolve_first(right_runs)
        if one.channels is other.channels and one.block == other.block:
            _note_coupling(one.channels, other.channels, relation)
            left_runs.popleft()
            right_runs.popleft()
        elif one.block == other.block:
            size = min(one.channels.size, other.channels.size)
            if _split(one.channels, size) or _split(other.channels, size):
                continue  # the first runs are resolved again, now of equal size
            _merge(one.channels, other.channels, relation)
        else:
            fine, coarse = (one, other) if one.block < other.block else (other, one)
            size, remainder = divmod(coarse.extent, fine.block)
            if remainder or coarse.block % fine.block or size > fine.channels.size:
                return _fix_unaligned((*left_runs, *right_runs))
            if not _split(fine.channels, size):
                _define(fine.channels, Run(coarse.channels, coarse.block // fine.block), relation)


def cut(layout: Layout, start: int, length: int) -> Layout:
    """Return `length` positions of a layout from `start` on. A cut inside a channel's block fixes that set."""
    remaining, passed, runs = deque(layout), 0, []
    while remaining and passed < start + length:
        run = _resolve_first(remaining)
        for edge in (start, start + length):
            inside = edge - passed
            if 0 < inside < run.extent:
                if inside % run.block:
                    run.channels.fixed = run.channels.fixed or "sliced within a channel"
                    return fixed_layout(length, "sliced within a channel")
                _split(run.channels, inside // run.block)
                break
        else:
            remaining.popleft()
            if passed >= start:
                runs.append(run)
            passed += run.extent
    return tuple(runs)


def kept_extent(layout: Layout, kept: Callable[[ChannelSet], int]) -> int:
    """Return the size of a dimension when `kept(set)` channels of each set are left."""
    return sum(kept(run.channels) * run.block for run in resolve(layout))


def _resolve_first(runs: deque[Run]) -> Run:
    """Rewrite the first run in terms of a root without a definition, in place, and return it."""
    while True:
        run = runs[0]
        root = find(run.channels)
        if root.definition is None:
            runs[0] = Run(root, run.block)
            return runs[0]
        runs.popleft()
        runs.extendleft(reversed(repeat_positions(root.definition, run.block)))


def _split(channels: ChannelSet, size: int) -> bool:
    """Define the set as its first `size` channels and the others; False if it has no others."""
    if size == channels.size:
        return False
    subsets = [
        ChannelSet(subset_size, channels.fixed, channels.coupled, channels.padding, channels.heads)
        for subset_size in (size, channels.size - size)
    ]
    channels.definition = tuple(Run(subset, 1) for subset in subsets)
    return True


def _merge(one: ChannelSet, other: ChannelSet, relation: Relation) -> None:
    """Make `one` the root of `other`."""
    _absorb(one, other, relation)
    other.parent = one


def _define(fine: ChannelSet, coarse: Run, relation: Relation) -> None:
    """Define `fine` as the channels of `coarse`, several positions per channel."""
    _absorb(coarse.channels, fine, relation)
    fine.definition = (coarse,)


def _absorb(into: ChannelSet, other: ChannelSet, relation: Relation) -> None:
    """Transfer what is known of `other` to `into`."""
    _note_coupling(into, other, relation)
    into.fixed = into.fixed or other.fixed
    into.coupled = into.coupled or other.coupled
    into.padding = into.padding or other.padding
    if relation is Relation.GATE and into.heads and other.heads:
        into.heads = min(into.heads, other.heads, key=min)
    else:
        into.heads = into.heads | other.heads


def _note_coupling(one: ChannelSet, other: ChannelSet, relation: Relation) -> None:
    """Mark a set as coupled if a sum joins it with another set, both computed or padded."""
    computed = (one.heads or one.padding) and (other.heads or other.padding)
    if relation is Relation.SUM and one is not other and computed:
        one.coupled = True


def _fix_unaligned(runs: Iterable[Run]) -> None:
    """Fix channels whose blocks do not line up."""
    fix(tuple(runs), "meets channels that do not line up with it")
