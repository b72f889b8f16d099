"""From layouts to groups: what each channel set is called, and which sets are offered for pruning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from structured_ensembles.networks.resizing import Axis, NestedSpan, Span
from structured_ensembles.tracing.layout import NO_CHANNELS, SINGLE, ChannelSet, Layout, Run, resolve
from structured_ensembles.tracing.walk import Producer, Walk

COUPLED = "coupled by a residual sum (trace(…, coupled=True) offers it)"
MIXED = "{}: exact only with all of them (trace(…, approximate=True) offers it)"
NESTED = 'lies in a product with {} (trace(…, nested="all") offers both)'


@dataclass(frozen=True)
class NamedSet:
    """A channel set that some layer computes, and its name. reason: why it is not offered; None if it is."""

    channels: ChannelSet
    name: str
    size: int
    producers: tuple[int, ...]  # numbers of the producers
    reason: str | None


def name_sets(walk: Walk, coupled: bool, approximate: bool, nested: bool) -> list[NamedSet]:
    """Name the channel sets that layers compute, in the order of computation, and decide which are offered.

    nested: offer all sets of a product, not only the one with the most channels.
    """
    names: dict[ChannelSet, str] = {}
    sizes: dict[ChannelSet, int] = {}
    producers: dict[ChannelSet, list[int]] = {}
    for number, producer in enumerate(walk.producers):
        for channels, name, size in _sets_of(producer):
            names.setdefault(channels, name)
            sizes.setdefault(channels, size)
            producers.setdefault(channels, []).append(number)
    reasons = {channels: _reason(channels, coupled, approximate) for channels in names}
    if not nested:
        layouts = [dim for value in walk.parameters.values() for dim in value.dims]
        reasons |= _coarser_factors(layouts, names, reasons)
    return [
        NamedSet(channels, name, sizes[channels], tuple(dict.fromkeys(producers[channels])), reasons[channels])
        for channels, name in names.items()
    ]


def _sets_of(producer: Producer) -> Iterable[tuple[ChannelSet, str, int]]:
    """Yield the channel sets of a producer's output with their names and sizes.

    A set that is only a piece of the output is named after its positions; of a product, the inner set is "within" the
    outer ones, the "groups". Fixed sets are left out of products in which others are not; adjacent ones are joined.
    """
    runs, start = resolve(producer.channels), 0
    numbered = groupby(enumerate(runs), key=lambda pair: pair[0] if _free(pair[1]) else None)
    pieces = [[run for _, run in piece] for _, piece in numbered]
    for piece in pieces:
        stop = start + sum(run.extent for run in piece)
        position = f"[{start}:{stop}]" if len(pieces) > 1 else ""
        start = stop
        free = _free(piece[0])
        if not free:
            factors = [factor for run in piece for factor in run.factors]
            known = max(factors, key=lambda factor: (factor.fixed not in (NO_CHANNELS, SINGLE), factor.size))
            in_blocks = len(piece) == 1 and any(factor.fixed == NO_CHANNELS for factor in factors)
            size = known.size if in_blocks else sum(run.extent for run in piece)
            yield known, producer.module + position, size
        for index, factor in enumerate(free):
            everywhere = all(factor in run.factors for run in runs)
            role = "" if len(free) == 1 else "[within]" if index == len(free) - 1 else "[groups]"
            if len(free) > 2 and role == "[groups]":
                role = f"[groups {index}]"
            yield factor, producer.module + ("" if everywhere else position) + role, factor.size


def _free(run: Run) -> list[ChannelSet]:
    """List the factors of a product from which channels may be removed."""
    return [factor for factor in run.factors if not factor.fixed]


def _reason(channels: ChannelSet, coupled: bool, approximate: bool) -> str | None:
    """Return why a set is not offered, apart from its neighbours in products."""
    if channels.fixed is not None:
        return channels.fixed
    if channels.mixed is not None and not approximate:
        return MIXED.format(channels.mixed)
    return COUPLED if channels.coupled and not coupled else None


def _coarser_factors(
    layouts: Iterable[Layout], names: Mapping[ChannelSet, str], reasons: Mapping[ChannelSet, str | None]
) -> dict[ChannelSet, str | None]:
    """Find the sets that lie in a product with a larger set: if both were halved, a quarter would be left.

    Products are taken in order, and each keeps its largest set that no product before has ruled out.
    """
    coarser: dict[ChannelSet, str | None] = {}
    for layout in layouts:
        for run in resolve(layout):
            free = [factor for factor in run.factors if factor in names and reasons[factor] is None]
            free = [factor for factor in dict.fromkeys(free) if factor not in coarser]
            if len(free) > 1:
                finest = max(reversed(free), key=lambda factor: factor.size)
                coarser |= {factor: NESTED.format(names[finest]) for factor in free if factor is not finest}
    return coarser


def axis_of(layout: Layout, names: Mapping[ChannelSet, str]) -> Axis:
    """Return the groups along a dimension; sets without a name belong to none."""
    return tuple(span for run in resolve(layout) for span in _spans(run.factors, names))


def _spans(factors: tuple[ChannelSet, ...], names: Mapping[ChannelSet, str]) -> Axis:
    """Return the spans of a product of channel sets."""
    first = next((index for index, factor in enumerate(factors) if factor in names), None)
    if first is None:
        block = 1
        for factor in factors[1:]:
            block *= factor.size
        return (Span(None, factors[0].size, block),)
    repeats = block = 1
    for factor in factors[:first]:
        repeats *= factor.size
    for factor in factors[first + 1 :]:
        block *= factor.size
    name, size, inner = names[factors[first]], factors[first].size, factors[first + 1 :]
    if any(factor in names for factor in inner):
        return (NestedSpan(name, size, block, _spans(inner, names)),) * repeats
    return (Span(name, size, block),) * repeats
