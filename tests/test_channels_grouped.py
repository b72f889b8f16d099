"""trace() and extract() of grouped convolutions, channel shuffles and group norms."""

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from tests.support.exactness import check_exact, randomize


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def grouped(groups: int = 4, width: int = 24, out: int = 16, transposed: bool = False) -> nn.Module:
    """A convolution, a grouped one, and one that reads all of its channels."""
    layer = nn.ConvTranspose2d if transposed else nn.Conv2d
    return nn.Sequential(
        nn.Conv2d(3, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        layer(width, out, 3, padding=1, groups=groups),
        nn.BatchNorm2d(out),
        nn.ReLU(),
        nn.Conv2d(out, 4, 1),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_channels_within_groups_are_kept_alike_in_all_groups(transposed: bool) -> None:
    graph = check_exact(randomize(grouped(transposed=transposed)), image())
    assert graph.prunable == {"0[within]": 6, "3[within]": 4}
    assert graph["0[groups]"].size == 4
    assert "lies in a product with 0[within]" in str(graph["0[groups]"].reason)
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    layer = se.extract(grouped(transposed=transposed).double(), graph, subnet)[3]
    assert (layer.groups, layer.in_channels, layer.out_channels) == (4, 12, 8)


@pytest.mark.parametrize("transposed", [False, True])
def test_whole_groups_go_where_they_are_more_than_the_channels_in_each(transposed: bool) -> None:
    graph = check_exact(randomize(grouped(groups=8, transposed=transposed)), image())
    assert graph.prunable == {"0[groups]": 8}
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    layer = se.extract(grouped(groups=8, transposed=transposed).double(), graph, subnet)[3]
    assert (layer.groups, layer.in_channels, layer.out_channels) == (4, 12, 8)


def test_all_nested_groups_are_offered_on_request() -> None:
    graph = check_exact(randomize(grouped()), image(), nested="all")
    assert graph.prunable == {"0[groups]": 4, "0[within]": 6, "3[within]": 4}
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    layer = se.extract(grouped().double(), graph, subnet)[3]
    assert (layer.groups, layer.in_channels, layer.out_channels) == (2, 6, 4)
    with pytest.raises(ValueError, match="nested must be one of"):
        se.trace(grouped(), image(), nested="both")


class Shuffle(nn.Module):
    """Two grouped convolutions with a shuffle of channels between them, as in ShuffleNet."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=2)
        self.c, self.last, self.residual = nn.Conv2d(12, 12, 3, padding=1, groups=2), nn.Conv2d(12, 3, 1), residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        batch, channels, height, width = y.shape
        y = y.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        y = self.c(y.relu())
        return self.last(x + y if self.residual else y)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("nested", ["finest", "all"])
def test_channel_shuffles_are_followed(residual: bool, nested: str) -> None:
    graph = check_exact(randomize(Shuffle(residual)), image(), coupled=True, nested=nested, prune=0.4)
    assert graph.prunable
    assert all(group.in_code is None or group.prunable for group in graph.groups)


def test_group_norm_loses_whole_groups_exactly_and_channels_in_them_only_approximately() -> None:
    model = randomize(nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(4, 12), nn.ReLU(), nn.Conv2d(12, 4, 1)))
    graph = check_exact(model, image())
    assert graph.prunable == {"0[groups]": 4}
    assert "group norm mixes its channels" in str(graph["0[within]"].reason)
    assert "approximate=True" in str(graph["0[within]"].reason)
    approximate = se.trace(model, image(), approximate=True, nested="all")
    assert approximate.prunable == {"0[groups]": 4, "0[within]": 3}
    assert approximate["0[within]"].approximate
    assert "not exact" in str(approximate)


def test_files_keep_the_number_of_groups(tmp_path) -> None:
    model = grouped(groups=8).float()
    graph = se.trace(model, image().float())
    networks = [
        se.extract(model, graph, subnet) for subnet in se.select(graph, prune=0.5, selection="random", members=2)
    ]
    ensemble = se.Ensemble(
        [nn.Sequential(network, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten()) for network in networks]
    )
    ensemble.save(tmp_path / "grouped.safetensors")
    base = nn.Sequential(model, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    loaded = se.Ensemble.load(tmp_path / "grouped.safetensors", model=base)
    torch.testing.assert_close(loaded(image().float()), ensemble.eval()(image().float()))


@pytest.mark.parametrize("nested", ["finest", "all"])
@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 8, 3, groups=8)]
)
def test_files_keep_groups_of_which_one_is_left_or_that_have_one_channel(
    layer: nn.Module, nested: str, tmp_path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randn(2, 3, 4, 4)
    graph = se.trace(model, x, nested=nested)
    members = [
        se.extract(model, graph, subnet) for subnet in se.select(graph, prune=0.5, selection="random", members=2)
    ]
    for base in (model, members[0]):
        se.Ensemble(members).save(tmp_path / "once.safetensors")
        again = se.Ensemble.load(tmp_path / "once.safetensors", model=base)
        again.save(tmp_path / "twice.safetensors")
        twice = se.Ensemble.load(tmp_path / "twice.safetensors", model=model)
        torch.testing.assert_close(twice(x), se.Ensemble(members).eval()(x))
