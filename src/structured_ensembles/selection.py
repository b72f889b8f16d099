"""select(): choose the neurons each member keeps; Subnet: the result."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from structured_ensembles.channels import ChannelGraph
from structured_ensembles.common.checks import check_choice, check_seed, check_share, check_type, check_whole
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.saliency import Scores
from structured_ensembles.scaling import check_prunable

Scope = Literal["layer", "network"]
Selection = Literal["learned", "random", "magnitude", "mirrored"]
ALMOST = 0.1  # of a member that may be missing in a round of disjoint parts


@dataclass(frozen=True)
class Subnet:
    """The channels of a network that a member keeps: for every prunable group its size and the channels, ascending.

    Frozen and hashable, so that it can be a key; `to_json` and `from_json` are inverse to each other.
    """

    groups: tuple[tuple[str, int, tuple[int, ...]], ...]

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Return the channels kept, by group."""
        return {name: channels for name, _, channels in self.groups}

    @property
    def counts(self) -> dict[str, int]:
        """Return how many channels are kept, by group."""
        return {name: len(channels) for name, _, channels in self.groups}

    def overlap(self, other: Subnet) -> float:
        """Return the share of neurons that both keep, from 0 to 1: twice the common ones over all kept."""
        mine, others = ({(name, channel) for name, _, kept in net.groups for channel in kept} for net in (self, other))
        return 2 * len(mine & others) / (len(mine) + len(others))

    def to_json(self) -> str:
        """Encode as JSON."""
        return json.dumps([{"group": name, "size": size, "kept": kept} for name, size, kept in self.groups])

    @classmethod
    def from_json(cls, text: str) -> Subnet:
        """Restore what `to_json` wrote; raise a ValueError that says what is invalid."""
        try:
            rows = json.loads(text)
            if not isinstance(rows, list) or not rows:
                raise TypeError("it must be a list with an entry for each group")
            return cls(tuple(_parse_group(row) for row in rows))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a Subnet: {error!r}") from error

    def __repr__(self) -> str:
        total, size = sum(self.counts.values()), sum(size for _, size, _ in self.groups)
        return f"Subnet({total:,} of {counted(size, 'channel')} kept)"

    def __str__(self) -> str:
        rows = [(name, f"{len(kept)}/{size}") for name, size, kept in self.groups]
        total, size = sum(self.counts.values()), sum(size for _, size, _ in self.groups)
        return text_table(("group", "kept"), rows) + f"\n{total:,} of {counted(size, 'channel')} kept"


def _parse_group(row: Any) -> tuple[str, int, tuple[int, ...]]:
    """Read a group from its JSON: name, size, and the channels kept, ascending; raise an error if it is invalid."""
    name, size, kept = row["group"], row["size"], row["kept"]
    if not isinstance(name, str) or type(size) is not int or not isinstance(kept, list):
        raise TypeError(f"a group must have a name, a size and a list of the channels kept, not {row!r:.100}")
    if any(type(channel) is not int for channel in kept):
        raise TypeError(f"the channels kept of {name} must be whole numbers")
    bounds = [-1, *kept, size]
    if any(low >= high for low, high in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"the channels kept of {name} must ascend from 0 to below {size}")
    return name, size, tuple(kept)


def select(
    graph: ChannelGraph,
    scores: Sequence[Scores] | None = None,
    *,
    prune: float | None = None,
    memory: float | None = None,
    scope: Scope = "layer",
    selection: Selection = "learned",
    members: int | None = None,
    seed: int = 0,
    round_to: int = 1,
) -> list[Subnet]:
    """Choose the neurons each member keeps; one `Subnet` per member.

    scores: from `saliency`, one per member. The controls need none: then `members` says how many subnets to make.
    prune: the share of neurons to remove: of n, the best n - ⌈prune·(n-1)⌉ stay, ties broken by index. Or instead
    memory: the size of all members together, in full networks: 1.0 finds the smallest `prune` at which they have no
        more parameters than the full network.
    scope: rank the neurons of each "layer", or all of the "network" together. A layer never loses its best neuron.
    selection: "learned" keeps the most salient neurons; "random" keeps as many of each layer, drawn with `seed`;
        "magnitude" those with the largest mean absolute weight, the same for every member; "mirrored" shares the
        neurons of each layer out, drawn with `seed`: at prune=0.5 members 1, 3, … keep what members 0, 2, … drop, and
        at prune ≥ 1 - 1/N all N members are disjoint. Each keeps as many as usual: where that is more than a layer
        has, members overlap as little as possible.
    round_to: round the number of channels up to a multiple, such as 8, for which GPUs are faster.
    """
    check_type("graph", graph, ChannelGraph, "trace(model, example) gives one")
    check_prunable(graph)
    check_choice("scope", scope, get_args(Scope))
    check_choice("selection", selection, get_args(Selection))
    check_whole("round_to", round_to)
    seed = check_seed(seed)
    if (prune is None) == (memory is None):
        raise ValueError("give either prune= or memory=, the one or the other")
    if prune is not None:
        check_share("prune", prune)
    if selection == "mirrored" and scope != "layer":
        raise ValueError(
            f'selection="mirrored" shares out the neurons of each layer: scope must be "layer", not {scope!r}'
        )
    rankings = _rankings(graph, scores, selection, members, seed)
    # Random selection keeps as many neurons of each layer as the scores would, where there are scores.
    size_rankings = rankings if scores is None or selection != "random" else [score.values for score in scores]

    def counts_at(share: float) -> list[dict[str, int]]:
        return [
            _round_counts(_count_kept(ranking, share, scope), graph.prunable, round_to) for ranking in size_rankings
        ]

    share = _find_share(graph, memory, len(rankings), counts_at) if prune is None else prune
    if scope == "layer":
        _warn_of_last_neurons(graph.prunable, share)
    else:
        _warn_of_empty_groups([_count_kept(ranking, share, scope) for ranking in size_rankings], share)
    counts = counts_at(share)
    if selection == "mirrored":
        _check_mirrored(counts[0], graph.prunable, prune, memory, len(rankings))
        rankings = _mirrored_rankings(graph.prunable, counts[0], share, len(rankings), seed)
    return [_make_subnet(*pair) for pair in zip(rankings, counts, strict=True)]


Ranking = Mapping[str, Tensor]  # what the neurons of each group are ranked by, shape (size,)


def _rankings(
    graph: ChannelGraph, scores: Sequence[Scores] | None, selection: Selection, members: int | None, seed: int
) -> list[Ranking]:
    """Return one ranking per member; raise a ValueError if scores or members do not fit."""
    if scores is not None:
        _check_scores(scores)
        if members is not None and members != len(scores):
            raise ValueError(f"members is {members}, but there are scores for {counted(len(scores), 'member')}")
        if any({name: len(value) for name, value in score.values.items()} != graph.prunable for score in scores):
            raise ValueError("scores do not belong to this graph: its prunable groups are others")
        members = len(scores)
    elif selection == "learned":
        raise ValueError('selection="learned" needs scores, from saliency(); the others need none')
    elif members is None:
        raise ValueError("members must be given where there are no scores")
    check_whole("members", members)
    if selection == "learned" and scores is not None:
        return [score.values for score in scores]
    if selection == "magnitude":
        return [graph.magnitudes] * members
    generator = torch.Generator().manual_seed(derive_seed(seed, "selection"))
    sizes = graph.prunable.items()
    return [{name: torch.rand(size, generator=generator) for name, size in sizes} for _ in range(members)]


def _check_scores(scores: Sequence[Scores]) -> None:
    """Raise an error unless `scores` is a list of finite `Scores`, at least one."""
    hint = "saliency(model, graph, scales, data) gives a list of them"
    if isinstance(scores, Scores):
        raise TypeError(f"scores must be a list of Scores, one for each member, not one of them: {hint}")
    if not isinstance(scores, Sequence) or not scores:
        raise ValueError(f"scores must be a list of Scores, one for each member, not {scores!r:.100}: {hint}")
    for score in scores:
        check_type("each of scores", score, Scores, hint)
        if not all(bool(torch.isfinite(values).all()) for values in score.values.values()):
            raise ValueError("scores must be finite numbers: these have NaN or infinity")


def _mirrored_rankings(
    sizes: Mapping[str, int], counts: Mapping[str, int], prune: float, members: int, seed: int
) -> list[Ranking]:
    """Rank the neurons so that members share each layer out, in rounds of as many members as fit: 1 / (1 - prune).

    A round has at least two members: pairs at prune=0.5, all of N members at prune ≥ 1 - 1/N (or hardly below, as a
    memory budget may give it). In each round, a layer's neurons are put in a random order, as a ring, and every member
    keeps the next `counts[layer]` of them. So their neurons are disjoint if they fit, and otherwise every neuron is
    kept by as many members of the round as any other, or by one more: the smallest overlap. It cannot be avoided
    below prune=0.5, nor where a layer's size is no multiple of the members.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "selection"))
    round_size = max(2, min(members, math.floor(1 / (1 - prune) + ALMOST)))
    rankings: list[Ranking] = []
    for first in range(0, members, round_size):
        positions = {name: torch.randperm(size, generator=generator) for name, size in sizes.items()}
        rankings += [
            {name: -((position - number * counts[name]) % sizes[name]) for name, position in positions.items()}
            for number in range(min(round_size, members - first))  # a member's neurons start where the last one's end
        ]
    return rankings


def _check_mirrored(
    counts: Mapping[str, int], sizes: Mapping[str, int], prune: float | None, memory: float | None, members: int
) -> None:
    """Raise a ValueError if members would keep everything, so that there is nothing to share out."""
    if members > 1 and all(counts[name] == size for name, size in sizes.items()):
        budget = f"prune={prune:g}" if prune is not None else f"memory={memory:g} for {counted(members, 'member')}"
        raise ValueError(
            f'selection="mirrored" needs members that keep a part of the neurons, but with {budget} each keeps all: '
            "give a larger prune, or less memory"
        )


def number_kept(size: int, prune: float) -> int:
    """Return how many of `size` neurons are left: those at or above the linearly interpolated percentile."""
    # The product is rounded first: 0.7 * 10 must not become 8 because binary fractions make it 7.000000000000001.
    return size - math.ceil(round(prune * (size - 1), 9))


def _count_kept(ranking: Ranking, prune: float, scope: Scope) -> dict[str, int]:
    """Return how many neurons of each group a member would keep.

    In scope "network" it may be 0, which `_round_counts` raises to 1; in scope "layer" it is at least 1.
    """
    if scope == "layer":
        return {name: number_kept(len(values), prune) for name, values in ranking.items()}
    all_values = torch.cat([values.double() for values in ranking.values()])
    groups = torch.cat([torch.full((len(values),), index) for index, values in enumerate(ranking.values())])
    best = _largest(all_values, number_kept(len(all_values), prune))
    return dict(zip(ranking, torch.bincount(groups[best], minlength=len(ranking)).tolist(), strict=True))


def _round_counts(counts: Mapping[str, int], sizes: Mapping[str, int], round_to: int) -> dict[str, int]:
    """Round up to a multiple of `round_to`, at least one and at most all neurons of a group."""
    return {name: min(max(1, -(-count // round_to) * round_to), sizes[name]) for name, count in counts.items()}


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest values, ascending; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values


def _make_subnet(ranking: Ranking, counts: Mapping[str, int]) -> Subnet:
    """Keep the largest values of each group."""
    rows = ((name, len(values), _largest(values, counts[name])) for name, values in ranking.items())
    return Subnet(tuple((name, size, tuple(kept.tolist())) for name, size, kept in rows))


def _find_share(
    graph: ChannelGraph, memory: Any, members: int, counts_at: Callable[[float], list[dict[str, int]]]
) -> float:
    """Find the smallest share to prune at which all members together are at most `memory` full networks."""
    if not isinstance(memory, Real) or isinstance(memory, bool) or not float(memory) > 0:
        raise ValueError(f"memory must be a number of networks above 0, not {memory!r}")
    memory = float(memory)
    base = graph.num_parameters()

    def memory_at(share: float) -> float:
        return sum(graph.num_parameters(counts) for counts in counts_at(share)) / base

    low, high = 0.0, 1 - 1e-6
    if memory_at(low) <= memory:
        return low
    if memory_at(high) > memory:
        raise ValueError(
            f"memory={memory:g} is too little for {counted(members, 'member')} of this network: with one neuron "
            f"left per layer they still need {memory_at(high):.3f}; take fewer members or a wider network"
        )
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if memory_at(middle) <= memory else (middle, high)
    return high


def _warn_of_last_neurons(sizes: Mapping[str, int], prune: float) -> None:
    """Warn if the share to keep of a group is less than one neuron, so that it loses less than its share."""
    small = sorted(name for name, size in sizes.items() if round(size * (1 - prune), 9) < 1)
    if small:
        names = ", ".join(small)
        warnings.warn(
            f"prune={prune:g} would leave less than one neuron of {names}: the best neuron of each is kept",
            stacklevel=3,
        )


def _warn_of_empty_groups(counts: Sequence[Mapping[str, int]], prune: float) -> None:
    """Warn if some group would lose all its neurons."""
    emptied = sorted({name for member_counts in counts for name, count in member_counts.items() if count == 0})
    if emptied:
        names = ", ".join(emptied)
        warnings.warn(f"prune={prune:g} would empty {names}: the best neuron of each is kept", stacklevel=3)
