"""Channels of zeros that make widths multiples of eight: which layers get them, and that nothing else changes."""

import pytest
import torch
from structured_ensembles.cuda.faster import faster
from torch import Tensor, nn
from torch.func import functional_call

import structured_ensembles as se
from structured_ensembles.cuda.bf16_copies import Halves, padded, part
from structured_ensembles.cuda.channel_padding import PaddingError, check_padding, padded_shapes
from structured_ensembles.training import fleet
from structured_ensembles.training import graph_engine as graph
from tests.support.networks import norms_of, pruned
from tests.support.real_data import few_digits


def shapes_of(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    network.to(memory_format=torch.channels_last)
    names, norms = [name for name, _ in network.named_parameters()], norms_of(network)
    try:
        shapes = padded_shapes(network, x, names, norms)
        check_padding(network, x, shapes, norms)
    except PaddingError:
        return {}
    return {name: shape[:2] for name, shape in shapes.items()}


def test_the_inner_widths_of_a_pruned_resnet() -> None:
    shapes = shapes_of(pruned(0.8), torch.randn(2, 3, 8, 8))
    assert len(shapes) == 18  # all but the first convolution
    assert shapes["layer1.0.conv1.weight"] == (8, 16)  # 4 are left of 16
    assert shapes["layer1.0.conv2.weight"] == (16, 8)
    assert shapes["layer3.2.conv1.weight"] == (16, 64)  # 13 of 64
    assert shapes_of(pruned(0.5), torch.randn(2, 3, 8, 8)) == {}


def test_a_padded_network_computes_the_same() -> None:
    """Outputs, derivatives and running statistics, in double precision."""
    x, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8)
    found = []
    for wide in (False, True):
        network = pruned(0.8).double().train().to(memory_format=torch.channels_last)
        names = [name for name, _ in network.named_parameters()]
        shapes = padded_shapes(network, x, names, norms_of(network)) if wide else {}
        assert len(shapes) == 18 * wide
        own = {name: padded(value.detach(), shapes.get(name)) for name, value in network.named_parameters()}
        leaves = [value.requires_grad_() for value in own.values()]
        with faster(norms_of(network), padded=True):
            outputs = functional_call(network, own, (x,))
        slopes = torch.autograd.grad(nn.functional.cross_entropy(outputs, labels), leaves)
        kept = [part(slope, network.get_parameter(name).shape) for name, slope in zip(own, slopes, strict=True)]
        found.append([outputs.detach(), *kept, *network.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Chain(nn.Sequential):
    """Two convolutions in a row, and what stands between and after them."""

    def __init__(self, between: nn.Module, bias: bool = False, groups: int = 1) -> None:
        first, second = nn.Conv2d(1, 6, 3, bias=bias), nn.Conv2d(6, 6, 3, bias=False, groups=groups)
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


class Counting(nn.Module):
    """Takes exactly so many channels."""

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


def test_only_what_is_sure_to_be_right() -> None:
    x = torch.randn(2, 1, 8, 8)
    expected = {"0.weight": (8, 1), "2.weight": (6, 8)}  # the last one's channels are read by a linear layer
    assert shapes_of(Chain(nn.ReLU()), x) == expected
    assert shapes_of(Chain(nn.BatchNorm2d(6)), x) == expected
    assert shapes_of(Chain(nn.InstanceNorm2d(6, affine=True)), x) == {}
    assert shapes_of(Chain(nn.ReLU(), bias=True), x) == {}
    assert shapes_of(Chain(nn.ReLU(), groups=2), x) == {}
    assert shapes_of(Twice(), x) == {}
    first = nn.Conv2d(1, 1, 1, bias=False)
    assert shapes_of(nn.Sequential(first, Chain(nn.ReLU())), x).keys() == {"1.0.weight", "1.2.weight"}
    assert shapes_of(nn.Sequential(first, Chain(Root())), x) == {}  # its derivative at zero is no number
    assert shapes_of(Chain(Wider()), x) == shapes_of(Chain(Counting()), x) == {}
    assert shapes_of(Chain(nn.GroupNorm(1, 6, affine=False)), x) == shapes_of(Chain(nn.Softmax2d()), x) == {}
    remembering = Chain(Remembering())
    remembering(x)
    assert shapes_of(remembering, x) == expected
    assert shapes_of(Chain(nn.Dropout2d(0.5)), x) == expected
    for hook in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        watched = Chain(nn.ReLU())
        getattr(watched[1], hook)(lambda *arguments: None)
        assert shapes_of(watched, x) == {}
    network = Chain(nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)
    assert padded_shapes(network, x, ["0.weight", "2.weight"], norms=[]) == {}
    assert padded_shapes(network, x, ["0.weight"], norms_of(network)) == {}  # the second one is frozen


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's steps on a CPU, with normalisations that take channels of zeros."""
    monkeypatch.setattr(fleet, "_captured", lambda recipe, device, mesh: True)
    monkeypatch.setattr(graph, "replaceable", norms_of)


BFLOAT16 = se.Execution(precision="bfloat16")
RECIPE = se.Recipe(epochs=2, batch_size=64, rate=0.05, augmentation="none", keep="last")


@pytest.mark.usefixtures("stepwise")
def test_members_that_look_alike_are_judged_one_by_one() -> None:
    """A normalisation over all channels has no parameters here, as an activation: only one of the two takes zeros."""

    def member(between: nn.Module) -> Chain:
        torch.manual_seed(0)
        return Chain(between)

    def losses(*between: nn.Module) -> list[list[float | None]]:
        networks = [member(own) for own in between]
        same = [0] * len(networks)  # the same batches
        history = se.train(
            se.Ensemble(networks), few_digits(), RECIPE, "cpu", execution=BFLOAT16, numbers=same, quiet=True
        )
        return [[row["loss"] for row in history.of(number)] for number in range(len(networks))]

    class Whole(nn.Module):
        own = staticmethod(torch.relu)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x)

    class Mixed(Whole):
        own = staticmethod(lambda x: nn.functional.layer_norm(x, x.shape[1:]))

    Mixed.__name__ = "Whole"  # the two print alike
    alone = losses(Whole()) + losses(Mixed())
    assert losses(Whole(), Mixed()) == alone
    assert losses(Mixed(), Whole()) == alone[::-1]


@pytest.mark.usefixtures("stepwise")
def test_a_normalization_too_narrow_for_its_input_is_an_error_at_once() -> None:
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(8 * 36, 10))
    with pytest.raises(RuntimeError, match="running_mean should contain 8 elements not 6"):
        se.train(se.Ensemble([network]), few_digits(), RECIPE, "cpu", execution=BFLOAT16, quiet=True)
    assert network[1].num_batches_tracked == 1  # in the first step


@pytest.mark.parametrize("between", [nn.BatchNorm2d(6), nn.ReLU(), nn.Sigmoid()])
@pytest.mark.usefixtures("stepwise")
def test_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch, between: nn.Module) -> None:
    """Also not where zero leads to something else, as with a sigmoid."""
    seen: list[Halves] = []

    class Watched(Halves):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            seen.append(self)

    monkeypatch.setattr(graph, "Halves", Watched)

    def losses() -> list[float | None]:
        torch.manual_seed(0)
        network = Chain(between)
        for layer in network.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        history = se.train(se.Ensemble([network]), few_digits(), RECIPE, "cpu", execution=BFLOAT16, quiet=True)
        assert network[0].weight.shape == (6, 1, 3, 3)
        return [value for row in history.rows for value in (row["loss"], row["validation_loss"])]

    padded = losses()
    halves = seen[-1]
    assert halves.whole["0.weight"].shape == (8, 1, 3, 3)
    assert halves.whole["2.weight"].shape == (6, 8, 3, 3)
    assert halves.whole["0.weight"][6:].count_nonzero() == halves.whole["2.weight"][:, 6:].count_nonzero() == 0
    for name, original in zip(halves.parts, halves.originals, strict=True):
        assert torch.equal(halves.parts[name], original.bfloat16())
    monkeypatch.setattr(graph, "padded_shapes", lambda *arguments: {})
    assert losses() == pytest.approx(padded, rel=5e-3)
    assert seen[-1].whole["0.weight"].shape == (6, 1, 3, 3)
