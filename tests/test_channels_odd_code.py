"""Odd little networks: code that differs in training mode, products with bare parameters, single channels, flags."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.networks.graph_network import GraphNetwork
from tests.support.exactness import check_exact, randomize


class Network(nn.Module):
    """Linear layers of 6 → 8 → 2 features, and a function of the network and its hidden features in between."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], hidden: int = 8, **more: Any) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(hidden, 2), between
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x).relu()))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Trained(Network):
    """A network whose code does something else in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(self.between(self, hidden) if self.training else hidden)


class TrainedInside(Network):
    """A network in which only a function inside of `forward` reads the mode."""

    def forward(self, x: Tensor) -> Tensor:
        def change(hidden: Tensor) -> Tensor:
            return hidden * hidden.shape[1] if self.training else hidden

        return self.last(change(self.first(x).relu()))


@pytest.mark.parametrize(
    "model",
    [
        Trained(lambda _, hidden: hidden * hidden.shape[1]),
        Trained(lambda _, hidden: hidden.view(-1, 8)),
        TrainedInside(lambda _, hidden: hidden),
    ],
    ids=["factor", "view", "inside"],
)
def test_code_of_training_mode_is_tried_on_fewer_channels_too(model: nn.Module) -> None:
    graph = check_exact(randomize(model), rows())
    assert graph["first"].in_code is not None
    assert se.trace(model, rows(), graphs=False)["first"].reason is not None


@pytest.mark.parametrize(
    "model",
    [
        Network(lambda net, hidden: hidden @ net.weight, 5, weight=weight(8, 5)),
        Network(lambda net, hidden: (net.weight @ hidden.unsqueeze(-1))[..., 0], 5, weight=weight(5, 8)),
        Network(lambda net, hidden: torch.einsum("bd,de->be", hidden, net.weight), 5, weight=weight(8, 5)),
        Network(lambda net, hidden: F.linear(hidden, net.weight), 5, weight=weight(5, 8)),
        Network(lambda net, hidden: torch.addmm(net.bias, hidden, net.weight), 5, weight=weight(8, 5), bias=weight(5)),
    ],
    ids=["right", "left", "einsum", "linear", "addmm"],
)
def test_bare_parameters_read_channels(model: nn.Module) -> None:
    graph = check_exact(randomize(model), rows())
    assert graph["first"].consumers == ("weight",)
    assert not graph["first"].products


class WithLayerInside(nn.Linear):
    """A linear layer whose own features go through another one before they are returned."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(x).relu())


@pytest.mark.parametrize(
    ("model", "scaled"), [(WithLayerInside(), []), (nn.Sequential(WithLayerInside(), nn.Linear(3, 2)), ["0.out"])]
)
def test_a_layer_with_another_one_inside_is_cut_and_not_scaled(model: nn.Module, scaled: list[str]) -> None:
    """A scaling vector multiplies what a layer returns, which are the features of the one inside."""
    graph = check_exact(randomize(model), rows())
    assert 8 in graph.prunable.values()
    assert list(graph.outputs) == scaled
    data = se.Data.from_arrays(rows(20).float(), torch.arange(20) % 2, classes=2)
    scales = se.learn_scales(model.float(), graph, data, members=2, epochs=1, quiet=True)
    assert all(scores.values.keys() == graph.prunable.keys() for scores in se.saliency(model, graph, scales, data))


def test_sum_of_products_with_a_broadcast_number_mixes_channels() -> None:
    def total(net: Any, hidden: Tensor) -> Tensor:
        return torch.einsum("bd,bd->b", hidden, net.gate(hidden.detach()[:, :1] * 0 + 1)).unsqueeze(1)

    graph = se.trace(Network(total, 1, gate=nn.Linear(1, 1)), rows().float())
    assert not graph.prunable


def test_sum_inside_of_a_matrix_product_couples_what_it_adds() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.added, self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 5), nn.Linear(6, 8)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.addmm(self.added(x), self.left(x), self.right(x[:5])))

    model = randomize(Adding())
    assert "residual sum" in str(se.trace(model, rows(7))["added"].reason)
    assert check_exact(model, rows(7), coupled=True)["added"].producers == ("added", "right")


def test_queries_that_are_channels_stay_under_a_causal_mask() -> None:
    def attend(net: Any, hidden: Tensor, causal: bool) -> Tensor:
        keys = net.keys(hidden.mean(1, keepdim=True)).view(-1, 8, 4)
        return F.scaled_dot_product_attention(hidden[..., None] * net.table, keys, keys, is_causal=causal).flatten(1)

    for causal in (False, True):
        model = Network(
            lambda net, hidden, causal=causal: attend(net, hidden, causal), 32, keys=nn.Linear(1, 32), table=weight(4)
        )
        graph = check_exact(randomize(model), rows(), approximate=False)
        if causal:
            assert graph["first"].reason == "a causal mask counts its positions"


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("squeeze", [lambda hidden: hidden.unsqueeze(-1).squeeze(), lambda hidden: hidden.squeeze(1)])
def test_a_single_channel_is_not_squeezed_away(squeeze: Callable[[Tensor], Tensor], hard: bool) -> None:
    model = randomize(Network(lambda _, hidden: squeeze(hidden.view(-1, 8) if hard else hidden)))
    graph = se.trace(model, rows())
    subnet = se.Subnet((("first", 8, (5,)),))
    small, masked = se.extract(model, graph, subnet), without_channels(model, graph, subnet)
    torch.testing.assert_close(small(rows()), masked(rows()))


def test_parts_of_a_tensor_split_lose_the_same_channels() -> None:
    def split(net: Any, hidden: Tensor) -> Tensor:
        first, second = torch.tensor_split(hidden[:, :4], 2, 1)
        return torch.cat([first.relu(), net.other(second)], 1)

    graph = check_exact(randomize(Network(split, 5, other=nn.Linear(2, 3))), rows())
    assert graph.prunable["first[0:2]"] == 2
    assert "first[2:4]" not in graph.prunable


def test_numbers_that_follow_the_batch_are_not_frozen_in_a_graph() -> None:
    model = randomize(Network(lambda _, hidden: hidden.view(-1, 8) / len(hidden)))
    assert "div depends on the number of samples" in str(se.trace(model, rows())["first"].reason)
    branching = Network(lambda _, hidden: hidden.view(-1, 8).relu() if len(hidden) < 5 else hidden.view(-1, 8))
    assert not se.trace(branching.double(), rows()).prunable


def test_code_that_branches_on_values_gets_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """torch.export logs a warning and prints a graph for it."""
    model = Network(lambda _, hidden: hidden.relu() if hidden.sum() > 0 else hidden).double()
    with pytest.raises(ValueError, match=r"cannot be followed on .* seems to branch on the values of a tensor"):
        se.trace(model, rows())
    assert capfd.readouterr() == ("", "")


def test_expanded_channels_of_one_value_are_cut_in_the_graph() -> None:
    # In training mode, sets are found to be the same again, after they got their names in evaluation mode.
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.wide, self.grouped = nn.Conv2d(3, 1, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1, groups=2)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.grouped(self.gate(x).expand(-1, 8, -1, -1) * self.wide(x)).mean((2, 3)))

    graph = check_exact(randomize(Gated()), torch.randn(2, 3, 4, 4, dtype=torch.float64))
    assert graph.prunable == {"wide[within]": 4, "grouped[within]": 3}


class Flagged(nn.Module):
    """A network with a list of tensors and a flag among its arguments, whose code relies on 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, tensors: list[Tensor], double: bool = False) -> Tensor:
        hidden = self.first(tensors[0] + tensors[1]).view(-1, 8)
        return self.last(hidden * 2 if double else hidden)


def test_graph_takes_nested_keywords_and_refuses_other_flags() -> None:
    model, pair = randomize(Flagged()), [rows(), rows() + 1]
    graph = check_exact(model, {"tensors": pair, "double": True})
    small = se.extract(model, graph, se.select(graph, prune=0.5, selection="random", members=1)[0])
    assert isinstance(small, GraphNetwork)
    torch.testing.assert_close(small(pair, True), small(tensors=pair, double=True))
    with pytest.raises(TypeError, match="traced with True for double, and cannot be run with False"):
        small(pair, False)
    with pytest.raises(TypeError, match="inputs tensors_0, tensors_1, but got 1 by position"):
        small([rows()], True)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [((2, 16, 16, 3), r"x.transpose\(0, 3, 1, 2\)"), ((3, 16, 16), r"one image: x\[None\]")],
)
def test_examples_of_another_layout_get_a_hint(shape: tuple[int, ...], hint: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))
    with pytest.raises(ValueError, match=hint):
        se.trace(model, torch.zeros(shape))
    with pytest.raises(ValueError, match=r"channels instead$"):
        se.trace(model, torch.zeros(2, 4, 16, 16))


@pytest.mark.parametrize(
    "expand", [lambda table, count: table.expand(count, -1), lambda table, count: table.repeat(count, 1)]
)
@pytest.mark.parametrize("samples", [2, 4])
def test_table_that_is_expanded_for_the_samples_and_indexed_follows_their_number(
    expand: Callable[[Tensor, int], Tensor], samples: int
) -> None:
    """The graph kept the number of samples of the example, so that GPT-2 without a mask failed on larger batches."""

    def between(network: Any, hidden: Tensor) -> Tensor:
        numbers = torch.arange(len(hidden))
        positions = expand(torch.arange(1, 9)[None], len(hidden))[numbers[:, None], torch.zeros(1, dtype=torch.long)]
        return hidden.view(-1, 8) * positions

    model = randomize(Network(between))
    graph = se.trace(model, rows(samples))
    assert graph.prunable == {"first": 8}
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    member, full = se.extract(model, graph, subnet).eval(), without_channels(model, graph, subnet).eval()
    assert isinstance(member, GraphNetwork)
    for count in (1, samples, 2 * samples + 1):
        torch.testing.assert_close(member(rows(count)), full(rows(count)))
