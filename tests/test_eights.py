"""Channels of zeros that make widths multiples of eight: which layers get them, and that nothing else changes."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import structured_ensembles as se
from structured_ensembles.training import fleet, graph
from structured_ensembles.training.eights import padded_shapes
from structured_ensembles.training.faster import faster
from structured_ensembles.training.halves import Halves, padded, part
from test_training import few_digits


def norms_of(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def shapes_of(network: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    network.to(memory_format=torch.channels_last)
    names = [name for name, _ in network.named_parameters()]
    return {name: shape[:2] for name, shape in padded_shapes(network, x, names, norms_of(network)).items()}


def pruned(prune: float, in_channels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    base = se.zoo.resnet20(in_channels=in_channels)
    traced = se.trace(base, torch.randn(2, in_channels, 8, 8))
    return se.extract(base, traced, se.select(traced, prune=prune, selection="random", members=1)[0])


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
        with faster(norms_of(network)):
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
    assert shapes_of(Chain(Root()), x) == {}  # its derivative at zero is no number
    watched = Chain(nn.ReLU())
    watched[1].register_forward_hook(lambda module, inputs, outputs: None)
    assert shapes_of(watched, x) == {}
    network = Chain(nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)
    assert padded_shapes(network, x, ["0.weight", "2.weight"], norms=[]) == {}
    assert padded_shapes(network, x, ["0.weight"], norms_of(network)) == {}  # the second one is frozen


@pytest.mark.parametrize("between", [nn.BatchNorm2d(6), nn.ReLU(), nn.Sigmoid()])
def test_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch, between: nn.Module) -> None:
    """Also not where zero leads to something else, as with a sigmoid."""
    monkeypatch.setattr(fleet, "_captured", lambda recipe, device, mesh: True)
    monkeypatch.setattr(graph, "replaceable", norms_of)
    seen: list[Halves] = []

    class Watched(Halves):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            seen.append(self)

    monkeypatch.setattr(graph, "Halves", Watched)
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.05, precision="bfloat16", augmentation="none", keep="last")

    def losses() -> list[float | None]:
        torch.manual_seed(0)
        network = Chain(between)
        for layer in network.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        history = se.train(se.Ensemble([network]), few_digits(), recipe, "cpu", quiet=True)
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
