"""rescale=True: inherited weights are scaled for the inputs that a layer lost; a warning without it."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.folder import read_config, read_result

SHORT = se.Recipe(epochs=1, rate=0.01)


def test_rescaled_vgg11_starts_like_the_full_one() -> None:
    torch.manual_seed(0)
    model = se.zoo.vgg11().eval()
    images = torch.randn(8, 3, 32, 32)
    graph = se.trace(model, images)
    subnet = se.select(graph, prune=0.8, selection="random", members=1)[0]
    plain, scaled = (se.extract(model, graph, subnet, rescale=rescale) for rescale in (False, True))
    with torch.no_grad():
        full, faint, mended = (float(net(images).std()) for net in (model, plain, scaled))
    assert full > 1
    assert 0.0003 < faint < 0.003
    assert full / 3 < mended < full * 3
    # Of n inputs, n - ⌈0.8·(n - 1)⌉ are left: 13 of 64, 103 of 512 (at 49 positions each), 820 of 4096.
    factors = {
        "features.0": 1.0,  # reads the image
        "features.3": math.sqrt(64 / 13),
        "classifier.0": math.sqrt(512 / 103),
        "classifier.6": math.sqrt(4096 / 820),
    }
    for name, factor in factors.items():
        torch.testing.assert_close(scaled.get_submodule(name).weight, plain.get_submodule(name).weight * factor)


def test_rescale_changes_only_weights_that_lost_inputs() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 16, 3, groups=8),  # depthwise: filters go, their inputs stay
        nn.BatchNorm2d(16),
        nn.ConvTranspose2d(16, 4, 2),  # its inputs are the first axis
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )
    graph = se.trace(model, torch.randn(2, 3, 6, 6))
    subnet = se.Subnet((("0", 8, (1, 4, 6)), ("3", 4, (0, 1, 3))))
    plain, scaled = (dict(se.extract(model, graph, subnet, rescale=rescale).state_dict()) for rescale in (False, True))
    factors = {"3.weight": math.sqrt(16 / 6), "5.weight": math.sqrt(4 / 3)}
    for name, tensor in plain.items():
        expected = tensor * factors[name] if name in factors else tensor
        torch.testing.assert_close(scaled[name], expected, rtol=1e-6, atol=0)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain.keys() - factors.keys())


def test_rescale_with_reinit_is_refused(digits: se.Data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    graph = se.trace(model, torch.randn(2, 1, 8, 8))
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    with pytest.raises(ValueError, match="rescale=True must not be given together with reinit=True"):
        se.extract(model, graph, subnet, reinit=True, rescale=True)
    with pytest.raises(ValueError, match="together with reinit=True"):  # before the search, which would say otherwise
        se.structured_ensemble(model, digits, 2, reinit=True, rescale=True, search_epochs=-1)
    with pytest.raises(TypeError, match="rescale must be True or False, not "):
        se.extract(model, graph, subnet, rescale="yes")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def digits() -> se.Data:
    data = se.load_data("digits")
    images, labels = next(data.train.batches(128))
    return se.Data.from_arrays(images, labels)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.wide = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for norm, wide, back in zip(self.norms, self.wide, self.back, strict=False):
            x = x + back(wide(norm(x)).relu())
        return self.last(self.norms[3](x))


def deep(norm: bool) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 20)]
    for _ in range(3):
        layers += [*([nn.BatchNorm1d(20)] if norm else []), nn.ReLU(), nn.Linear(20, 20)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(20, 10))


def test_trace_lists_layers_without_a_following_norm() -> None:
    graph = se.trace(deep(norm=True), torch.randn(2, 1, 8, 8))
    assert graph.unnormalized == {"10", "12"}  # the last hidden layer, and the output's
    # The residual stream is normalised before any layer reads it; what the wide layers give is not.
    graph = se.trace(Residual(), torch.randn(2, 1, 8, 8))
    assert graph.unnormalized == {"wide.0", "wide.1", "wide.2", "last"}
    assert set(graph.prunable) == {"wide.0", "wide.1", "wide.2"}


@pytest.mark.parametrize("method", ["structured", "random", "magnitude"])
def test_unnormalised_pruned_members_warn_once(method: str, digits: se.Data) -> None:
    settings = {"search_epochs": 1} if method == "structured" else {}

    def build(model: nn.Module, **more: object) -> list[str]:
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            METHODS[method](model, digits, 3, prune=0.8, recipe=SHORT, device="cpu", quiet=True, **settings, **more)
        return [str(warning.message) for warning in caught if "inherit" in str(warning.message)]

    (message,) = build(deep(norm=False))  # 20 inputs leave 4, four times: √(1/5)⁴ = 0.04
    assert "about 0.04 of the full network's" in message
    assert "rescale=True" in message
    assert build(deep(norm=False), rescale=True) == []
    assert build(deep(norm=True)) == []  # the last two layers alone: 0.2
    assert build(Residual()) == []


def test_reinitialised_members_do_not_warn(digits: se.Data) -> None:
    for method, more in (("structured", {"reinit": True, "selection": "random"}), ("narrow", {})):
        METHODS[method](deep(False), digits, 2, prune=0.8, recipe=SHORT, device="cpu", quiet=True, **more)


def test_rescale_is_part_of_the_run_identity(tmp_path) -> None:
    plain, scaled = (
        Experiment("digits", "lenet5", "random", members=2, method_arguments=arguments, changes={"epochs": 1}, limit=64)
        for arguments in ({"prune": 0.8}, {"prune": 0.8, "rescale": True})
    )
    assert plain.folder != scaled.folder
    assert "rescale=True" in scaled.folder
    train_experiment(scaled, tmp_path / "run", device="cpu", quiet=True)
    assert read_config(tmp_path / "run")["method_arguments"] == {"prune": 0.8, "rescale": True}
    with pytest.raises(ValueError, match="holds a run with another rescale:"):
        train_experiment(plain, tmp_path / "run", device="cpu", quiet=True)
    assert read_result(tmp_path / "run")["figures"]["size/members"] == 2
