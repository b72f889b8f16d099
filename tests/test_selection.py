"""select(): counts, scopes, memory budgets and controls."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structured_ensembles as se
from structured_ensembles.selection import number_kept


@pytest.fixture(scope="module")
def graph() -> se.ChannelGraph:
    return se.trace(se.zoo.resnet20(), torch.randn(2, 3, 32, 32))


def random_scores(graph: se.ChannelGraph, members: int = 5) -> list[se.Scores]:
    generator = torch.Generator().manual_seed(0)
    sizes = graph.prunable.items()
    return [se.Scores({n: torch.rand(size, generator=generator) for n, size in sizes}) for _ in range(members)]


def overhead(graph: se.ChannelGraph, subnets: list[se.Subnet]) -> float:
    return sum(graph.num_parameters(subnet.counts) for subnet in subnets) / graph.num_parameters()


@pytest.mark.parametrize(("prune", "expected"), [(0.3, 3.507), (0.5, 2.517), (0.7, 1.526), (0.8, 1.069), (0, 5.0)])
def test_overheads_of_five_resnet20_equal_the_papers(graph: se.ChannelGraph, prune: float, expected: float) -> None:
    subnets = se.select(graph, random_scores(graph), prune=prune)
    assert overhead(graph, subnets) == pytest.approx(expected, abs=5e-4)
    model = se.zoo.resnet20()
    extracted = sum(p.numel() for net in subnets for p in se.extract(model, graph, net).parameters())
    assert extracted / 269_722 == pytest.approx(expected, abs=5e-4)


def test_counts_at_prune_80_percent() -> None:
    assert [number_kept(n, 0.8) for n in (16, 32, 64)] == [4, 7, 13]


@given(st.integers(1, 300), st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99]))
def test_counts_equal_a_percentile(size: int, prune: float) -> None:
    values = np.arange(size, dtype=np.float64)
    threshold = np.round(np.percentile(values, 100 * prune), 9)
    assert number_kept(size, prune) == int((values >= threshold).sum())


def test_most_salient_channels_stay_and_ties_go_to_the_first() -> None:
    graph = se.trace(se.zoo.mlp(3, 2, hidden=(6,)), torch.randn(2, 3))
    scores = [se.Scores({"layers.1": torch.tensor(values)}) for values in ([0.1, 5, 0, 3, 4, 2], [1.0] * 6)]
    first, second = se.select(graph, scores, prune=0.5)
    assert first.kept == {"layers.1": (1, 3, 4)}
    assert second.kept == {"layers.1": (0, 1, 2)}


def test_scope_network_has_one_threshold_and_no_empty_layer() -> None:
    graph = se.trace(se.zoo.mlp(3, 2, hidden=(4, 6)), torch.randn(2, 3))
    scores = [se.Scores({"layers.1": torch.tensor([1.0, 2, 3, 4]), "layers.3": torch.tensor([0.1, 9, 8, 7, 6, 5])})]
    (subnet,) = se.select(graph, scores, prune=0.3, scope="network")  # 10 - ⌈0.3·9⌉ = 7 neurons
    assert subnet.kept == {"layers.1": (2, 3), "layers.3": (1, 2, 3, 4, 5)}
    with pytest.warns(UserWarning, match=r"prune=0\.5 would empty layers\.1: the best neuron of each is kept"):
        (subnet,) = se.select(graph, scores, prune=0.5, scope="network")
    assert subnet.kept == {"layers.1": (3,), "layers.3": (1, 2, 3, 4, 5)}


def test_layer_of_whose_neurons_less_than_one_is_to_stay_keeps_its_best_and_warns_once() -> None:
    graph = se.trace(se.zoo.mlp(3, 2, hidden=(4, 40)), torch.randn(2, 3))
    with pytest.warns(UserWarning, match=r"would leave less than one neuron of layers\.1: the best") as caught:
        subnets = se.select(graph, random_scores(graph, 3), prune=0.9)
    assert len(caught) == 1
    assert subnets[0].counts == {"layers.1": 1, "layers.3": 4}


@pytest.mark.filterwarnings("error")
def test_layer_scope_never_says_that_a_layer_would_be_empty() -> None:
    """Of n neurons, n − ⌈p·(n − 1)⌉ stay: at least one, of two at any share."""
    graph = se.trace(se.zoo.mlp(3, 2, hidden=(2, 40)), torch.randn(2, 3))
    (subnet,) = se.select(graph, random_scores(graph, 1), prune=0.5)
    assert subnet.counts == {"layers.1": 1, "layers.3": 20}
    with pytest.warns(UserWarning, match=r"^prune=0\.55 would leave less than one neuron of layers\.1: the best"):
        (subnet,) = se.select(graph, random_scores(graph, 1), prune=0.55)
    assert subnet.counts == {"layers.1": 1, "layers.3": 18}


@pytest.mark.parametrize("memory", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("scope", ["layer", "network"])
def test_memory_budget_is_used_but_not_exceeded(graph: se.ChannelGraph, memory: float, scope: str) -> None:
    memory_used = overhead(graph, se.select(graph, random_scores(graph), memory=memory, scope=scope))
    assert 0.93 * memory <= memory_used <= memory  # one neuron more in every layer would be too much
    assert overhead(graph, se.select(graph, random_scores(graph), memory=9.0, scope=scope)) == 5


def test_too_small_memory_budget_error_names_the_minimum(graph: se.ChannelGraph) -> None:
    with pytest.raises(ValueError, match=r"memory=0\.1 is too little for 5 members.*still need 0\.138"):
        se.select(graph, random_scores(graph), memory=0.1)


def test_round_to_gives_multiples(graph: se.ChannelGraph) -> None:
    subnets = se.select(graph, random_scores(graph), prune=0.7, round_to=8)
    assert {count for subnet in subnets for count in subnet.counts.values()} == {8, 16, 24}
    assert overhead(graph, se.select(graph, random_scores(graph), memory=2.0, round_to=8)) <= 2.0


def test_random_selection_follows_the_seed_and_magnitude_the_weights(graph: se.ChannelGraph) -> None:
    random = se.select(graph, prune=0.5, selection="random", members=5, seed=0)
    assert random == se.select(graph, prune=0.5, selection="random", members=5, seed=0)
    assert random != se.select(graph, prune=0.5, selection="random", members=5, seed=1)
    assert len(set(random)) == 5
    scores = random_scores(graph)
    learned = se.select(graph, scores, prune=0.5, scope="network")
    same_sizes = se.select(graph, scores, prune=0.5, scope="network", selection="random", seed=5)
    assert [subnet.counts for subnet in same_sizes] == [subnet.counts for subnet in learned]
    assert same_sizes != learned

    model = se.zoo.mlp(3, 2, hidden=(4,))
    with torch.no_grad():
        model.layers[1].weight.copy_(torch.tensor([[1.0, 1, 1], [-3, 0, 0], [0, 0, 9], [-1, -1, 0]]))
    graph = se.trace(model, torch.randn(2, 3))
    subnets = se.select(graph, prune=0.5, selection="magnitude", members=2)
    assert [subnet.kept for subnet in subnets] == [{"layers.1": (0, 2)}] * 2  # means 1, 1, 3, 2/3: the first of equals


def test_subnet_is_hashable_and_round_trips_through_json() -> None:
    one = se.Subnet((("a", 4, (0, 1)), ("b", 6, (1, 2, 5))))
    other = se.Subnet((("a", 4, (1, 2)), ("b", 6, (1, 2, 5))))
    assert {one: 1}[se.Subnet.from_json(one.to_json())] == 1
    assert json.loads(one.to_json())[0] == {"group": "a", "size": 4, "kept": [0, 1]}
    assert one.overlap(one) == 1
    assert one.overlap(other) == other.overlap(one) == 0.8
    assert str(one).splitlines()[-3:] == ["a       2/4", "b       3/6", "5 of 10 channels kept"]
    with pytest.raises(AttributeError):
        one.groups = ()
    for invalid in ('{"a": 1}', "{}", "[]", "null", "["):
        with pytest.raises(ValueError, match="not the JSON of a Subnet"):
            se.Subnet.from_json(invalid)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    """They have no order, so that any neurons could be kept."""
    graph = se.trace(se.zoo.mlp(3, 2, hidden=(4,)), torch.randn(2, 3))
    scores = se.Scores({"layers.1": torch.tensor([1.0, value, 3, 4])})
    with pytest.raises(ValueError, match="scores must be finite numbers: these have NaN or infinity"):
        se.select(graph, [scores], prune=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prune": 1.0}, "prune must be at least 0 and less than 1"),
        ({"prune": -0.1}, "prune must be"),
        ({"prune": float("nan")}, "prune must be"),
        ({"memory": 0}, "memory must be"),
        ({}, "either prune= or memory="),
        ({"prune": 0.5, "memory": 1.0}, "either prune= or memory="),
        ({"prune": 0.5, "scope": "global"}, "scope must be one of 'layer', 'network'"),
        ({"prune": 0.5, "selection": "best"}, "selection must be one of"),
        ({"prune": 0.5, "round_to": 0}, "round_to must be"),
        ({"prune": 0.5, "members": 3}, "members is 3, but there are scores for 5"),
    ],
)
def test_invalid_arguments_are_errors(graph: se.ChannelGraph, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.select(graph, random_scores(graph), **arguments)


def test_missing_scores_and_scores_of_other_graphs_are_errors(graph: se.ChannelGraph) -> None:
    with pytest.raises(ValueError, match="needs scores"):
        se.select(graph, prune=0.5)
    with pytest.raises(ValueError, match="members must be given"):
        se.select(graph, prune=0.5, selection="random")
    with pytest.raises(ValueError, match="do not belong to this graph"):
        se.select(graph, [se.Scores({"fc": torch.ones(10)})], prune=0.5)
