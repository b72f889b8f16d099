"""select(selection="mirrored"): members share the neurons of every layer out, without other counts than usual."""

import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import structured_ensembles as se

SIZES = (16, 5, 33, 60)


@pytest.fixture(scope="module")
def graph() -> se.ChannelGraph:
    return se.trace(se.zoo.mlp(3, 2, hidden=SIZES), torch.randn(2, 3))


def mirrored(graph: se.ChannelGraph, members: int, **arguments: object) -> list[se.Subnet]:
    with warnings.catch_warnings(action="ignore"):  # a small layer may be emptied
        return se.select(graph, selection="mirrored", members=members, **arguments)  # type: ignore[arg-type]


def test_second_of_a_pair_keeps_what_the_first_drops(graph: se.ChannelGraph) -> None:
    subnets = mirrored(graph, 5, prune=0.5)
    for first, second in (subnets[:2], subnets[2:4]):
        for name, size in graph.prunable.items():
            kept = [*first.kept[name], *second.kept[name]]
            assert set(kept) == set(range(size))
            assert len(kept) - size == size % 2  # of an odd number, 3 of 5 stay: one is in both
    assert 0.3 < subnets[0].overlap(subnets[2]) < 0.7  # another round, another draw
    assert subnets[4] not in subnets[:4]


@pytest.mark.parametrize(("members", "prune"), [(3, 2 / 3), (4, 0.75), (5, 0.8), (4, 0.9)])
def test_all_members_are_disjoint_where_they_fit(members: int, prune: float) -> None:
    wide = se.trace(se.zoo.mlp(3, 2, hidden=(60, 120)), torch.randn(2, 3))
    subnets = mirrored(wide, members, prune=prune)
    assert all(one.overlap(other) == 0 for one in subnets for other in subnets if one is not other)


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 9),
    prune=st.sampled_from([0.1, 0.3, 0.49, 0.5, 0.6, 2 / 3, 0.7, 0.75, 0.8, 0.9, 0.97]),
    round_to=st.sampled_from([1, 1, 4]),
    seed=st.integers(0, 2**32),
)
def test_neurons_are_shared_out_evenly_with_the_usual_counts(
    graph: se.ChannelGraph, members: int, prune: float, round_to: int, seed: int
) -> None:
    arguments = {"prune": prune, "round_to": round_to, "seed": seed}
    subnets = mirrored(graph, members, **arguments)
    with warnings.catch_warnings(action="ignore"):
        usual = se.select(graph, selection="random", members=members, **arguments)  # type: ignore[arg-type]
    assert [subnet.counts for subnet in subnets] == [subnet.counts for subnet in usual]
    together = max(2, min(members, int(1 / (1 - prune) + 0.1)))
    for first in range(0, members, together):
        for name, size in graph.prunable.items():
            kept = Counter(channel for subnet in subnets[first : first + together] for channel in subnet.kept[name])
            times = [kept[channel] for channel in range(size)]
            assert max(times) - min(times) <= 1  # so no smaller overlap is possible
    assert subnets == mirrored(graph, members, **arguments)
    assert subnets != mirrored(graph, members, **{**arguments, "seed": seed + 1})


@pytest.mark.parametrize(("members", "memory"), [(2, 1.0), (4, 1.0), (3, 2.0)])
def test_memory_budget_holds(graph: se.ChannelGraph, members: int, memory: float) -> None:
    subnets = mirrored(graph, members, memory=memory)
    assert [subnet.counts for subnet in subnets] == [
        subnet.counts for subnet in se.select(graph, selection="random", members=members, memory=memory)
    ]
    assert sum(graph.num_parameters(subnet.counts) for subnet in subnets) <= memory * graph.num_parameters()
    assert len(set(subnets)) == members


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prune": 0.0}, r"needs members that keep a part .* with prune=0 each keeps all"),
        ({"memory": 2.0}, r"with memory=2 for 2 members each keeps all: give a larger prune, or less memory"),
        ({"prune": 0.5, "scope": "network"}, r'scope must be "layer", not \'network\''),
    ],
)
def test_what_mirrored_members_cannot_do_is_an_error(graph: se.ChannelGraph, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.select(graph, selection="mirrored", members=2, **arguments)
