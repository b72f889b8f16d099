"""Channels of zeros give members common widths, multiples of eight in bfloat16; nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.channel_padding import common_network, shapes_of
from structured_ensembles.cuda.compilation import compile_networks
from structured_ensembles.cuda.program import ProgramError
from structured_ensembles.training import graph_engine
from structured_ensembles.training.program_runner import ProgramRunner
from tests.support.engines import use_engine
from tests.support.networks import pruned
from tests.support.programs import assert_equal, images, results_of, results_of_network
from tests.support.real_data import few_digits

BFLOAT16 = se.Execution(precision="bfloat16")
RECIPE = se.Recipe(epochs=2, batch_size=64, rate=0.05, augmentation="none", keep="last")


def padded_shapes(network: nn.Module, example: Tensor, multiple: int = 8) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that padding has made wider."""
    _, shapes = common_network([network], example, multiple)
    before = shapes_of(network)
    return {name: shape[:2] for name, shape in shapes.items() if shape != before[name] and len(shape) > 1}


def test_the_inner_widths_of_a_pruned_resnet() -> None:
    shapes = padded_shapes(pruned(0.8), torch.randn(2, 3, 8, 8))
    assert len(shapes) == 18  # all but the first convolution
    assert shapes["layer1.0.conv1.weight"] == (8, 16)  # 4 are left of 16
    assert shapes["layer1.0.conv2.weight"] == (16, 8)
    assert shapes["layer3.2.conv1.weight"] == (16, 64)  # 13 of 64
    assert padded_shapes(pruned(0.5), torch.randn(2, 3, 8, 8)) == {}


def test_where_nothing_has_to_be_padded_the_network_is_its_own() -> None:
    network = pruned(0.5)
    assert common_network([network], torch.randn(2, 3, 8, 8), 8)[0] is network
    assert common_network([pruned(0.8)], torch.randn(2, 3, 8, 8), 1)[1] == shapes_of(pruned(0.8))


def test_a_padded_network_computes_the_same() -> None:
    """Outputs, gradients and running statistics, in double precision."""
    network, x = pruned(0.8), torch.randn(2, 3, 8, 8)
    told: list[str] = []
    (one,) = compile_networks([network], x, bfloat16=True, together=True, tell=told.append)
    assert told == []
    assert one.shapes["layer1.0.conv1.weight"] == (8, 16, 3, 3)
    example = images(8, size=8)
    actual = results_of(one.program, [network], [example], one.shapes)[0]
    assert_equal(actual, results_of_network(network, example, one.program.counters))


class Chain(nn.Sequential):
    """Two convolutions in a row, and what stands between and after them."""

    def __init__(self, between: nn.Module, bias: bool = False, groups: int = 1, width: int = 6) -> None:
        first, second = nn.Conv2d(1, width, 3, bias=bias), nn.Conv2d(width, 6, 3, bias=False, groups=groups)
        super().__init__(first, between, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10))


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


class Wider(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.shape[1] > 6 else x


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.last = x  # part of a graph: a plain deep copy would refuse it
        return x


class Exactly(nn.Module):
    """Take exactly so many channels."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= 6
        return x


class Twice(nn.Module):
    """What a convolution computes is read by another, and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        features: Tensor = self.head(torch.cat([x, self.second(x)], 1).mean((2, 3)))
        return features


EXACT: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Chain(nn.ReLU()),
    "norm": lambda: Chain(nn.BatchNorm2d(6)),
    "sigmoid": lambda: Chain(nn.Sigmoid()),  # zero leads to something else, which weights of zero read
    "bias": lambda: Chain(nn.ReLU(), bias=True),
    "pooling": lambda: Chain(nn.MaxPool2d(2)),
    "instance norm": lambda: Chain(nn.InstanceNorm2d(6, affine=True)),
    "groups": lambda: Chain(nn.ReLU(), groups=2),
    "read beside": Twice,
    "all channels normalised": lambda: Chain(nn.GroupNorm(1, 6, affine=False)),
    "all channels summed up": lambda: Chain(nn.Softmax2d()),
    "as many as known": lambda: Chain(Exactly()),
    "another result if wider": lambda: Chain(Wider()),
    "no gradient at zero": lambda: Chain(Root()),
    "remembering": lambda: Chain(Remembering()),
}
PADDED = {"relu", "norm", "sigmoid", "bias", "pooling"}


@pytest.mark.parametrize("name", EXACT)
def test_a_network_is_padded_only_where_nothing_changes(name: str) -> None:
    """A program of a padded network is used if a trial shows the same as without, and refused otherwise."""
    network, x = EXACT[name](), torch.randn(2, 1, 8, 8)
    told: list[str] = []
    actual = compile_networks([network], x, bfloat16=True, together=True, tell=told.append)
    for one in actual:
        example = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        results = results_of(one.program, [network], [example], one.shapes)[0]
        assert_equal(results, results_of_network(network, example, one.program.counters))
    if name in PADDED:
        assert told == []
        assert actual[0].shapes["0.weight"] == (8, 1, 3, 3)
        assert actual[0].shapes["2.weight"][1] == 8


def test_members_that_differ_in_more_than_widths_are_refused() -> None:
    other = Chain(nn.ReLU())
    other[2] = nn.Conv2d(6, 6, 1, bias=False)
    with pytest.raises(ProgramError, match=r"'2.weight' is \(6, 6, 1, 1\), not \(6, 6, 3, 3\)"):
        common_network([Chain(nn.ReLU()), other], torch.randn(2, 1, 8, 8), 1)


def test_widths_that_cannot_be_padded_are_refused() -> None:
    """A norm over all channels counts them: those of zeros would be noticed."""
    first, second = (Chain(nn.InstanceNorm2d(width, affine=True), width=width) for width in (6, 7))
    told: list[str] = []
    actual = compile_networks([first, second], torch.randn(2, 1, 8, 8), bfloat16=False, together=True, tell=told.append)
    assert [one.numbers for one in actual] == [(0,), (1,)]
    assert told[0].startswith("members are computed one by one, slower: ")


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ProgramRunner]:
    """Train with programs on the CPU; lists the runners that were made."""
    made: list[ProgramRunner] = []

    class Watched(ProgramRunner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    use_engine(monkeypatch, "graph")
    monkeypatch.setattr(graph_engine, "ProgramRunner", Watched)
    return made


class Whole(nn.Module):
    """An activation of each pixel."""

    function = staticmethod(torch.relu)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Mixed(Whole):
    """A norm over all channels, without parameters: it looks like the activation."""

    function = staticmethod(lambda x: nn.functional.layer_norm(x, x.shape[1:]))


def losses(*between: nn.Module) -> list[list[float | None]]:
    networks = []
    for module in between:
        torch.manual_seed(0)
        networks.append(Chain(module))
    same = [0] * len(networks)  # the same batches
    history = se.train(se.Ensemble(networks), few_digits(), RECIPE, "cpu", execution=BFLOAT16, numbers=same, quiet=True)
    return [[row["loss"] for row in history.of(number)] for number in range(len(networks))]


@pytest.mark.usefixtures("runners")
def test_members_that_look_alike_are_judged_one_by_one() -> None:
    alone = losses(Whole()) + losses(Mixed())
    for actual, expected in zip(losses(Whole(), Mixed()), alone, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "between", [nn.BatchNorm2d(6), nn.ReLU(), nn.Sigmoid()], ids=lambda module: type(module).__name__
)
def test_padding_does_not_change_training(
    between: nn.Module, runners: list[ProgramRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = losses(between)
    stack = runners[-1].stack
    shapes = {runners[-1].program.names[placeholder]: tensor for placeholder, tensor in stack.weights.items()}
    assert shapes["0.weight"].shape == (1, 8, 1, 3, 3)
    assert shapes["2.weight"].shape[2] == 8
    assert shapes["0.weight"][:, 6:].count_nonzero() == shapes["2.weight"][:, :, 6:].count_nonzero() == 0
    assert shapes["0.weight"].dtype == torch.bfloat16
    (member,) = runners[-1].members
    assert member.network.get_parameter("0.weight").shape == (6, 1, 3, 3)
    monkeypatch.setattr(graph_engine, "compile_networks", lambda *arguments: [])
    for layer in between.modules():
        if hasattr(layer, "reset_running_stats"):
            layer.reset_parameters()
    number = len(runners)
    for actual, expected in zip(losses(between), padded, strict=True):
        assert actual == pytest.approx(expected, rel=2e-2)
    assert len(runners) == number


@pytest.mark.usefixtures("runners")
def test_a_normalization_too_narrow_for_its_input_is_an_error_at_once() -> None:
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(8 * 36, 10))
    with pytest.raises(RuntimeError, match="running_mean should contain 8 elements not 6"):
        se.train(se.Ensemble([network]), few_digits(), RECIPE, "cpu", execution=BFLOAT16, quiet=True)
    assert network[1].num_batches_tracked == 1  # in the first step
