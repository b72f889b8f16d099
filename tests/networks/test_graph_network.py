"""Networks that run a cut graph: ordinary modules for training, saving, copying and export."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.networks.graph_network import GraphNetwork
from tests.support.exactness import randomize


class Fixed(nn.Module):
    """A network whose code relies on 8 channels, with a batch norm, dropout and a buffer that counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8 * 16, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = x.view(len(x), 8, 4, 2, 4, 2).amax((3, 5))
        return self.head(self.drop(x.reshape(x.shape[0], 8 * 16) * self.scale))


def images(count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def cut(model: nn.Module, members: int = 1, example: Tensor | None = None) -> list[nn.Module]:
    graph = se.trace(model, images(2) if example is None else example)
    subnets = se.select(graph, prune=0.5, selection="random", members=members)
    return [se.extract(model, graph, subnet) for subnet in subnets]


def test_state_dict_has_the_names_of_the_code() -> None:
    model = Fixed()
    (small,) = cut(model)
    assert isinstance(small, GraphNetwork)
    assert list(small.state_dict()) == list(model.state_dict())
    assert small.conv.weight.shape == (4, 3, 3, 3)
    assert small.head.in_features == 64
    assert "operations" in repr(small)


class Contiguous(nn.Module):
    """Asks for contiguous images before a hard-coded view: for the example of the trace that copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).contiguous().view(len(x), 8 * 64))


def test_images_stored_channels_last_run_where_the_code_asks_for_contiguous_ones() -> None:
    model = randomize(Contiguous())
    (small,) = cut(model, example=images(2, torch.float64))
    assert isinstance(small, GraphNetwork)
    x = images(3, torch.float64)
    torch.testing.assert_close(small(x.contiguous(memory_format=torch.channels_last)), small(x))


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("traced", [1, 2, 5])
def test_batches_of_any_size_run_whatever_the_example_had(count: int, traced: int) -> None:
    model = randomize(Fixed())
    graph = se.trace(model, images(traced, torch.float64))
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    small, masked = se.extract(model, graph, subnet), without_channels(model, graph, subnet)
    for training in (False, True):
        ours, theirs = (network.train(training)(images(count, torch.float64)) for network in (small, masked))
        torch.testing.assert_close(ours, theirs)


def test_training_updates_weights_and_statistics_as_the_code_would() -> None:
    """The masked network has the same gradients where the small one has weights, and the same running statistics."""
    model = randomize(Fixed())
    graph = se.trace(model, images(2, torch.float64))
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    small, masked = se.extract(model, graph, subnet).train(), without_channels(model, graph, subnet).train()
    for network in (small, masked):
        network(images(6, torch.float64)).square().sum().backward()
    kept = list(subnet.kept["conv"])
    torch.testing.assert_close(small.conv.weight.grad, masked.conv.weight.grad[kept])
    torch.testing.assert_close(small.norm.running_var, masked.norm.running_var[kept])
    assert int(small.norm.num_batches_tracked) == int(masked.norm.num_batches_tracked) == 1


def test_dropout_follows_the_mode() -> None:
    (small,) = cut(Fixed(dropout=0.5))
    small.eval()
    assert torch.equal(small(images()), small(images()))
    small.train()
    assert not torch.equal(small(images()), small(images()))


def test_copies_are_independent_and_other_dtypes_run() -> None:
    (small,) = cut(Fixed())
    small.eval()
    before = small(images())
    other = copy.deepcopy(small)
    with torch.no_grad():
        other.head.weight.zero_()
    assert torch.equal(small(images()), before)
    torch.testing.assert_close(copy.deepcopy(small).double()(images(6, torch.float64)).float(), before)


def test_created_tensors_have_the_device_and_dtype_of_the_network() -> None:
    class Creates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            ones = torch.ones(x.shape[0], 8, dtype=x.dtype, device=x.device)
            return self.b((self.a(x) * ones).view(-1, 8))

    graph = se.trace(Creates(), torch.randn(2, 4))
    small = se.extract(Creates(), graph, se.select(graph, prune=0.5, selection="random", members=1)[0])
    assert isinstance(small, GraphNetwork)
    assert small.double()(torch.randn(3, 4).double()).dtype == torch.float64
    assert small.to("meta")(torch.randn(3, 4, device="meta", dtype=torch.float64)).device.type == "meta"


def test_ensemble_of_graph_networks_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=generator)
    pixels = (torch.randint(0, 60, (96, 3, 8, 8), generator=generator) + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    data = se.Data.from_arrays(pixels, labels, test=(pixels[:24], labels[:24]))
    torch.manual_seed(0)
    recipe = se.Recipe.named("modern", epochs=3)
    ensemble = se.structured_ensemble(
        Fixed(), data, members=2, prune=0.5, selection="random", recipe=recipe, trained=False, quiet=True
    )
    assert all(isinstance(network, GraphNetwork) for network in ensemble.members)
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.6
    ensemble.save(tmp_path / "fixed.safetensors")
    loaded = se.Ensemble.load(tmp_path / "fixed.safetensors", model=Fixed())
    assert all(isinstance(network, GraphNetwork) for network in loaded.members)
    assert torch.equal(loaded.predict_proba(pixels[:5]), ensemble.predict_proba(pixels[:5]))
    from_member = se.Ensemble.load(tmp_path / "fixed.safetensors", model=ensemble.members[0])
    assert torch.equal(from_member.predict_proba(pixels[:5]), ensemble.predict_proba(pixels[:5]))


def test_graph_network_can_be_exported() -> None:
    (small,) = cut(Fixed())
    exported = torch.export.export(small.eval(), (images(3),)).module()
    torch.testing.assert_close(exported(images(3)), small(images(3)))


def test_wrong_inputs_are_named() -> None:
    (small,) = cut(Fixed())
    with pytest.raises(TypeError, match=r"traced with the inputs x, but got none"):
        small()
    with pytest.raises(TypeError, match=r"traced with the inputs x, but got 2 by position"):
        small(images(), images())
    assert small.eval()(x=images()).shape == (6, 5)


def test_constant_tensors_leave_the_code_to_be_cut() -> None:
    """The graph of the fake model does not have their values."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c((self.b(self.a(x).view(-1, 6)) * torch.tensor(2.0)).relu())

    graph = se.trace(Constant(), torch.randn(2, 4))
    assert "b" in graph.prunable
    assert graph["b"].in_code is None or graph.templates
