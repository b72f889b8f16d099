"""Layouts: which channels lie along a dimension, and the algebra that finds out which channels are the same.

A *channel set* is a number of channels, each of which is kept or dropped wherever it appears. Sets are the nodes of a
union-find structure: two sets that turn out to be the same channels are merged; a set that turns out to consist of
others is *defined* as a layout of them: one after the other (a concatenation), or as a product (groups of channels).

A *layout* is the content of one dimension: a sequence of runs. A run is a product of sets, the outermost first, and has
one position per combination of their channels. A convolution's output has the layout ((set),) in dimension 1;
flattening (channels, height, width) gives ((set, height · width),), the queries of an attention ((heads, features),),
concatenation joins layouts. Sizes that are no channels, such as height · width, are sets that are fixed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

NO_CHANNELS = "positions such as pixels or tokens, not channels"
SINGLE = "a single channel"
UNALIGNED = "meets channels that do not line up with it"
MAX_REPEATS = 4096  # of runs in one dimension; a longer layout would be too slow


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
    mixed: str | None = None  # why removing one is not exact: a norm or a mean runs over the channels
    coupled: bool = False  # merged with another layer's output by a residual sum
    computed: bool = False  # the output of a layer
    padding: bool = False  # constants that an operation appended: no layer computes them
    batch: bool = False  # the samples of a batch
    counted: bool = False  # positions that an operation counts, which may turn out to be samples
    heads: frozenset[int] = frozenset()  # the producers that a scaling vector scales, by number
    in_code: str | None = None  # why only the exported graph can be cut, and not the model's code
    parent: ChannelSet | None = None
    definition: Layout | None = None  # the sets that it consists of, if it is defined by them


class Run(NamedTuple):
    """A product of channel sets along a dimension, outermost first."""

    factors: tuple[ChannelSet, ...]

    @property
    def extent(self) -> int:
        """Return the number of positions."""
        return math.prod(factor.size for factor in self.factors)

    @property
    def block(self) -> int:
        """Return the number of consecutive positions per channel of the outermost set."""
        return math.prod(factor.size for factor in self.factors[1:])


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
    return (Run((ChannelSet(size, **properties),)),)  # type: ignore[arg-type]


def fixed_layout(size: int, reason: str = NO_CHANNELS) -> Layout:
    """Make a layout from which nothing can be removed, such as that of a spatial dimension."""
    return new_layout(size, fixed=reason)


def extent(layout: Layout) -> int:
    """Return the number of positions of a layout."""
    return sum(run.extent for run in layout)


def product(outer: Layout, inner: Layout) -> Layout | None:
    """Return the layout of two dimensions that are flattened to one; None if no layout can say that.

    Of a concatenation inside of something else, the runs are repeated for every position outside.
    """
    if extent(outer) == 1 or extent(inner) == 1:
        return inner if extent(outer) == 1 else outer
    inner_runs = resolve(inner)
    if len(inner_runs) > 1 and is_fixed(inner):
        inner_runs = fixed_layout(extent(inner))
    if len(inner_runs) == 1:
        return tuple(Run((*run.factors, *inner_runs[0].factors)) for run in resolve(outer))
    if is_fixed(outer) and extent(outer) * len(inner_runs) <= MAX_REPEATS:
        return inner_runs * extent(outer)
    return None


def repeat_positions(layout: Layout, factor: int) -> Layout:
    """Replace every position by `factor` consecutive ones."""
    return layout if factor == 1 else tuple(Run((*run.factors, ChannelSet(factor, NO_CHANNELS))) for run in layout)


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
        resolved.append(_resolve_first(remaining))
        remaining.popleft()
    return tuple(resolved)


def channel_sets(layout: Layout) -> list[ChannelSet]:
    """List the distinct channel sets of a layout, in order."""
    return list(dict.fromkeys(factor for run in resolve(layout) for factor in run.factors))


def is_fixed(layout: Layout) -> bool:
    """Tell whether no channel of a layout can be removed."""
    return all(channels.fixed for channels in channel_sets(layout))


def fix(layout: Layout, reason: str) -> None:
    """Mark the channels of a layout as not removable; the first reason stays."""
    for channels in channel_sets(layout):
        channels.fixed = channels.fixed or reason


def mix(layout: Layout, reason: str) -> None:
    """Mark the channels of a layout as computed from each other, so that removing one changes the others."""
    for channels in channel_sets(layout):
        channels.mixed = channels.mixed or reason


def unify(left: Layout, right: Layout, relation: Relation = Relation.SAME) -> None:
    """Record that two dimensions of equal extent hold the same channels, position by position."""
    assert extent(left) == extent(right), (left, right)
    left_runs, right_runs = deque(left), deque(right)
    while left_runs:
        one, other = _resolve_first(left_runs), _resolve_first(right_runs)
        if one.extent != other.extent:
            longer, border = (left_runs, other.extent) if one.extent > other.extent else (right_runs, one.extent)
            _split_first(longer, border, UNALIGNED)
            continue
        match _align(one, other, relation):
            case True:
                left_runs.popleft()
                right_runs.popleft()
            case False:
                return fix((*left_runs, *right_runs), UNALIGNED)
            case None:
                pass  # sets were merged or split: the runs are resolved again


def _align(one: Run, other: Run, relation: Relation) -> bool | None:
    """Compare two products of equal extent from the innermost factor on; merge or split the first pair that differs.

    Returns True if the products are the same, None if a set changed, and False if their sizes do not allow it.
    """
    left, right = _tokens(one), _tokens(other)
    while left:
        last, other_last = left.pop(), right.pop()
        if last is other_last:
            continue
        small, large, rest = (last, other_last, right) if last.size <= other_last.size else (other_last, last, left)
        if large.size % small.size:
            return False
        if isinstance(last, ChannelSet) and isinstance(other_last, ChannelSet):
            if small.size == large.size:
                _merge(last, other_last, relation)
            else:
                split_product(last if last is large else other_last, small.size)
            return None
        if isinstance(small, ChannelSet) and not small.fixed:  # positions that stay fix the channels that lie there
            small.fixed = large.fixed
            return None
        if isinstance(large, ChannelSet) and not large.fixed:
            if small.size == large.size:
                large.fixed = small.fixed
            else:
                split_product(large, small.size)
            return None
        if small.size < large.size:  # the samples of a batch count as positions that stay
            rest.append(_Number(large.size // small.size, str(large.fixed)))
    return True


class _Number(NamedTuple):
    """Positions that all stay: adjacent fixed sets of a product."""

    size: int
    fixed: str


def _tokens(run: Run) -> list[ChannelSet | _Number]:
    """List the factors of a product, with adjacent fixed ones as one number."""
    tokens: list[ChannelSet | _Number] = []
    for factor in run.factors:
        last = tokens[-1] if tokens else None
        if factor.fixed is None or factor.batch or factor.counted:
            tokens.append(factor)
        elif isinstance(last, _Number):
            tokens[-1] = _Number(last.size * factor.size, last.fixed)
        else:
            tokens.append(_Number(factor.size, factor.fixed))
    return tokens


def split_product(channels: ChannelSet, inner: int) -> tuple[ChannelSet, ChannelSet]:
    """Define a set as a product of groups, and of `inner` channels in each of them; return the two sets."""
    factors = _like(channels, channels.size // inner), _like(channels, inner)
    channels.definition = (Run(factors),)
    return factors


def cut(layout: Layout, start: int, length: int) -> Layout:
    """Return `length` positions of a layout from `start` on. A cut inside a channel's block fixes that set."""
    remaining, passed, runs = deque(layout), 0, []
    while remaining and passed < start + length:
        run = _resolve_first(remaining)
        borders = [edge - passed for edge in (start, start + length) if 0 < edge - passed < run.extent]
        if borders:
            _split_first(remaining, borders[0], "sliced within a channel")
            continue
        remaining.popleft()
        if passed >= start:
            runs.append(run)
        passed += run.extent
    return tuple(runs)


def kept_extent(layout: Layout, kept: Callable[[ChannelSet], int]) -> int:
    """Return the size of a dimension when `kept(set)` channels of each set are left."""
    return sum(math.prod(map(kept, run.factors)) for run in resolve(layout))


def _resolve_first(runs: deque[Run]) -> Run:
    """Rewrite the first run in terms of roots without definitions, in place, and return it."""
    while True:
        factors = runs[0].factors
        for index, factor in enumerate(factors):
            root = find(factor)
            if (
                root is not factor
                or root.definition is not None
                or (root.size == 1 and root.fixed and len(factors) > 1)
            ):
                _rewrite_first(runs, index, root)
                break
        else:
            return runs[0]


def _rewrite_first(runs: deque[Run], index: int, root: ChannelSet) -> None:
    """Replace one factor of the first run by its root, or by what the root consists of."""
    run = runs.popleft()
    before, after = run.factors[:index], run.factors[index + 1 :]
    if root.definition is None:
        single = root.size == 1 and bool(root.fixed) and len(run.factors) > 1
        runs.appendleft(Run((*before, *(() if single else (root,)), *after)))
        return
    pieces = [Run((*piece.factors, *after)) for piece in root.definition]
    if len(pieces) == 1 or not before:
        runs.extendleft(reversed([Run((*before, *piece.factors)) for piece in pieces]))
        return
    # A concatenation inside of groups: the groups stay, and their contents are repeated.
    repeats = math.prod(factor.size for factor in before)
    fix((Run(before),), "its groups are made of several pieces")
    if repeats * len(pieces) <= MAX_REPEATS:
        runs.extendleft(reversed(pieces * repeats))
        return
    reason = "its groups are made of too many pieces"
    fix(tuple(pieces), reason)
    runs.appendleft(Run((*before, ChannelSet(root.size, reason), *after)))


def _split_first(runs: deque[Run], border: int, reason: str) -> None:
    """Split the first run's outermost set, so that a run begins at `border` or, after more such splits, will begin."""
    run = runs[0]
    outermost = run.factors[0]
    whole, within = divmod(border, run.block)
    if within:  # one channel's block is split: the channels must stay
        outermost.fixed = outermost.fixed or reason
    split_sequence(outermost, max(whole, 1))


def split_sequence(channels: ChannelSet, size: int) -> None:
    """Define a set as its first `size` channels and the others, if there are others."""
    if size < channels.size:
        subsets = (_like(channels, subset_size) for subset_size in (size, channels.size - size))
        channels.definition = tuple(Run((subset,)) for subset in subsets)
    elif channels.size == 1:
        channels.fixed = channels.fixed or SINGLE  # of no size: only what is inside of it counts


def _like(channels: ChannelSet, size: int) -> ChannelSet:
    """Make a set of another size of which the same is known."""
    fixed = channels.fixed or (SINGLE if size == 1 else None)
    return replace(channels, size=size, fixed=fixed, batch=False, counted=False, parent=None, definition=None)


def _merge(one: ChannelSet, other: ChannelSet, relation: Relation) -> None:
    """Make `one` the root of `other`, and transfer what is known of it."""
    if relation is Relation.SUM and (one.computed or one.padding) and (other.computed or other.padding):
        one.coupled = True
    one.fixed = one.fixed or other.fixed
    one.mixed = one.mixed or other.mixed
    one.coupled = one.coupled or other.coupled
    one.computed = one.computed or other.computed
    one.padding = one.padding or other.padding
    one.batch = one.batch or other.batch
    one.counted = one.counted and other.counted
    one.in_code = one.in_code or other.in_code
    if relation is Relation.GATE and one.heads and other.heads:
        one.heads = min(one.heads, other.heads, key=min)
    else:
        one.heads = one.heads | other.heads
    other.parent = one
