"""What a dimension holds: runs of channels, and the algebra that finds out which channels must be the same ones.

A *channel set* is a number of channels that can only be kept or dropped one by one and wherever they appear. Sets are
the nodes of a union-find structure: two sets that turn out to be the same channels are merged; a set that turns out to
be several others in a row (a concatenation, or a flattened feature map) is *defined* as a layout of them.

A *layout* says what the positions of one dimension are: a row of runs, each the channels of one set with `block`
consecutive positions per channel. A convolution's output has the layout ((set, 1),) in dimension 1; flattening
(channels, height, width) leaves ((set, height * width),); concatenation puts layouts in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class How(Enum):
    """What makes two channel sets one: decides whether they are coupled, and whose output a scaling vector scales."""

    SUM = "sum"  # a residual sum (or any other pointwise meeting of two layers): every producer is scaled
    GATE = "gate"  # a product: scaling its first factor scales it
    SAME = "same"  # a parameter that lies along channels, or the same channels seen twice


@dataclass(eq=False)
class ChannelSet:
    """A node of the union-find structure; ask `find` for the node that speaks for it."""

    size: int
    fixed: str | None = None  # why no channel can be removed
    coupled: bool = False  # a residual sum made it one with another layer's output
    padding: bool = False  # constants that some operation appended: no layer computes them
    heads: frozenset[int] = frozenset()  # the producers that a scaling vector scales, by number
    parent: ChannelSet | None = None
    parts: Layout | None = None


class Run(NamedTuple):
    channels: ChannelSet
    block: int  # consecutive positions per channel

    @property
    def extent(self) -> int:
        return self.channels.size * self.block


Layout = tuple[Run, ...]


@dataclass
class Value:
    """A tensor of the traced graph: its shape, and the layout of each dimension."""

    shape: tuple[int, ...]
    dims: tuple[Layout, ...]
    parameter: str | None = field(default=None)  # its name, where the value is a parameter or buffer itself

    def __post_init__(self) -> None:
        assert tuple(extent(dim) for dim in self.dims) == self.shape, (self.shape, self.dims)


def fresh(size: int, **properties: object) -> Layout:
    """A new set of channels as a layout of its own."""
    return (Run(ChannelSet(size, **properties), 1),)  # type: ignore[arg-type]


def plain(size: int, reason: str = "not a dimension of channels") -> Layout:
    """A dimension that is not about channels (batch, height, …): nothing in it can be removed."""
    return fresh(size, fixed=reason)


def extent(layout: Layout) -> int:
    """The size of the dimension."""
    return sum(run.extent for run in layout)


def blocks(layout: Layout, factor: int) -> Layout:
    """Every position becomes `factor` consecutive ones."""
    return tuple(Run(run.channels, run.block * factor) for run in layout)


def find(channels: ChannelSet) -> ChannelSet:
    root = channels
    while root.parent is not None:
        root = root.parent
    while channels.parent is not None:  # path compression keeps tracing linear
        channels.parent, channels = root, channels.parent
    return root


def resolve(layout: Layout) -> Layout:
    """The layout in terms of the sets as they are known now: roots that are not defined as others."""
    resolved: list[Run] = []
    pending = deque(layout)
    while pending:
        run = _head(pending)
        pending.popleft()
        resolved.append(run)
    return tuple(resolved)


def channel_sets(layout: Layout) -> list[ChannelSet]:
    """The distinct sets that a layout is about, in order."""
    return list(dict.fromkeys(run.channels for run in resolve(layout)))


def is_fixed(layout: Layout) -> bool:
    return all(channels.fixed for channels in channel_sets(layout))


def fix(layout: Layout, reason: str) -> None:
    """No channel of this dimension can be removed; the first reason given is the one kept."""
    for channels in channel_sets(layout):
        channels.fixed = channels.fixed or reason


def unify(left: Layout, right: Layout, how: How = How.SAME) -> None:
    """Learn that two dimensions of equal extent hold the same channels, position by position."""
    assert extent(left) == extent(right), (left, right)
    left_runs, right_runs = deque(left), deque(right)
    while left_runs:
        one, other = _head(left_runs), _head(right_runs)
        if one.channels is other.channels and one.block == other.block:
            _note_meeting(one.channels, other.channels, how)
            left_runs.popleft()
            right_runs.popleft()
        elif one.block == other.block:
            size = min(one.channels.size, other.channels.size)
            if _split(one.channels, size) or _split(other.channels, size):
                continue  # the heads are looked up again: the first parts now have equal size
            _merge(one.channels, other.channels, how)
        else:
            fine, coarse = (one, other) if one.block < other.block else (other, one)
            size, remainder = divmod(coarse.extent, fine.block)
            if remainder or coarse.block % fine.block or size > fine.channels.size:
                return _give_up((*left_runs, *right_runs))
            if not _split(fine.channels, size):
                _define(fine.channels, Run(coarse.channels, coarse.block // fine.block), how)


def cut(layout: Layout, start: int, length: int) -> Layout:
    """The part of a dimension from `start`, `length` positions long. A cut inside a channel's block fixes that set."""
    pending, passed, taken = deque(layout), 0, []
    while pending and passed < start + length:
        run = _head(pending)
        for edge in (start, start + length):
            inside = edge - passed
            if 0 < inside < run.extent:
                if inside % run.block:
                    run.channels.fixed = run.channels.fixed or "sliced within a channel"
                    return plain(length, "sliced within a channel")
                _split(run.channels, inside // run.block)
                break
        else:
            pending.popleft()
            if passed >= start:
                taken.append(run)
            passed += run.extent
    return tuple(taken)


def kept_extent(layout: Layout, kept: Callable[[ChannelSet], int]) -> int:
    """The size of the dimension when `kept(set)` channels of each set are left."""
    return sum(kept(run.channels) * run.block for run in resolve(layout))


def _head(runs: deque[Run]) -> Run:
    """The first run in terms of the sets as they are known now; `runs` is rewritten accordingly."""
    while True:
        run = runs[0]
        root = find(run.channels)
        if root.parts is None:
            runs[0] = Run(root, run.block)
            return runs[0]
        runs.popleft()
        runs.extendleft(reversed(blocks(root.parts, run.block)))


def _split(channels: ChannelSet, size: int) -> bool:
    """Define the set as its first `size` channels and the others; False if it has no others."""
    if size == channels.size:
        return False
    parts = [
        ChannelSet(part, channels.fixed, channels.coupled, channels.padding, channels.heads)
        for part in (size, channels.size - size)
    ]
    channels.parts = tuple(Run(part, 1) for part in parts)
    return True


def _merge(one: ChannelSet, other: ChannelSet, how: How) -> None:
    _absorb(one, other, how)
    other.parent = one


def _define(fine: ChannelSet, coarse: Run, how: How) -> None:
    """`fine` is the channels of `coarse`, several positions each."""
    _absorb(coarse.channels, fine, how)
    fine.parts = (coarse,)


def _absorb(into: ChannelSet, other: ChannelSet, how: How) -> None:
    """What is known of `other` holds for `into`."""
    _note_meeting(into, other, how)
    into.fixed = into.fixed or other.fixed
    into.coupled = into.coupled or other.coupled
    into.padding = into.padding or other.padding
    if how is How.GATE and into.heads and other.heads:
        into.heads = min(into.heads, other.heads, key=min)
    else:
        into.heads = into.heads | other.heads


def _note_meeting(one: ChannelSet, other: ChannelSet, how: How) -> None:
    computed = (one.heads or one.padding) and (other.heads or other.padding)
    if how is How.SUM and one is not other and computed:
        one.coupled = True


def _give_up(runs: Iterable[Run]) -> None:
    fix(tuple(runs), "meets channels that do not line up with it")
