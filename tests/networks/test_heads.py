"""with_head(): the classifier is a new one, everything else stays, and frozen layers stay frozen to the end."""

from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se

X = torch.randn(2, 3, 32, 32)


class HeadFirst(nn.Module):
    """Define the classifier before the layers that feed it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5, bias=False)
        self.body = nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x).relu().mean((2, 3)))
        return logits


class WithoutMessage(nn.Linear):
    """Fail with an error that has no message, as code with a bare `assert` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError


def check_rest_is_equal(copied: nn.Module, model: nn.Module, head: str) -> None:
    state, before = copied.state_dict(), model.state_dict()
    assert state.keys() == before.keys()
    differing = {name for name in state if not torch.equal(state[name], before[name])}  # shapes count too
    assert differing == {f"{head}.{name}" for name in ("weight", "bias") if f"{head}.{name}" in before}


def torchvision_model(name: str) -> nn.Module:
    return pytest.importorskip("torchvision").models.get_model(name)


@pytest.mark.parametrize(("name", "head"), [("resnet18", "fc"), ("squeezenet1_1", "classifier.1")])
@pytest.mark.parametrize("example", [None, X.repeat(1, 1, 2, 2)])
def test_classifiers_of_torchvision_are_replaced(name: str, head: str, example: torch.Tensor | None) -> None:
    model = torchvision_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copied = se.with_head(model, 7, example=example)
    assert copied.eval()(X.repeat(1, 1, 2, 2)).shape == (2, 7)
    check_rest_is_equal(copied, model, head)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    again, other = se.with_head(model, 7), se.with_head(model, 7, seed=1)
    weights = [network.get_submodule(head).weight for network in (copied, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_models_of_timm_replace_their_own_classifier() -> None:
    model = pytest.importorskip("timm").create_model("test_resnet", pretrained=False).double()
    copied = se.with_head(model, 4).eval()
    assert copied.get_classifier().weight.dtype == torch.float64
    assert copied(X.double().repeat(1, 1, 3, 3)).shape == (2, 4)
    assert copied.num_classes == 4
    assert model.num_classes == 1000


def test_example_finds_a_classifier_that_is_defined_first() -> None:
    model = HeadFirst()
    copied = se.with_head(model, 3, example=X)
    check_rest_is_equal(copied, model, "head")
    assert copied.head.bias is None
    assert copied(X).shape == (2, 3)


def test_random_state_stays() -> None:
    model = se.zoo.resnet20(10)
    state = torch.get_rng_state()
    se.with_head(model, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_ensemble_knows_the_new_number_of_classes(tmp_path: Path) -> None:
    model = se.with_head(se.zoo.resnet20(num_classes=10), 3)
    se.Ensemble([model]).save(tmp_path / "file")
    loaded = se.Ensemble.load(tmp_path / "file")
    assert torch.equal(loaded(X), se.Ensemble([model.eval()])(X))
    pytest.importorskip("torchvision")
    named = se.from_factory("torchvision.models:resnet18")
    with pytest.warns(UserWarning, match="cannot say how its network is made"):  # resnet18() alone would have 1000
        se.Ensemble([se.with_head(named, 3)]).save(tmp_path / "file")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.ReLU()), {}, "but its last layer is none: replace its last layer yourself"),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), {}, r"convolution of kernel size 1 .* its last layer is 0, Conv2d\(3, 4"),
        (nn.Sequential(nn.Linear(32, 4)), {"example": X}, r"must give \(batch, 2\) .* it gives \(2, 3, 32, 2\)"),
        (nn.Linear(4, 4), {}, "model is a single layer"),
        (se.zoo.mlp(4), {"example": X}, r"example must be a batch .* not a tensor of shape \(2, 3, 32, 32\), which it"),
        (se.zoo.mlp(4), {"example": "x"}, "example must be a batch as the model gets it, .* not a str"),
        (nn.Sequential(WithoutMessage(4, 4)), {"example": X}, "cannot run on: AssertionError"),
        (se.zoo.mlp(4), {"classes": 0}, "classes must be a whole number of at least 1, not 0"),
    ],
)
def test_networks_without_a_classifier_are_refused(model: nn.Module, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.with_head(model, **{"classes": 2, **arguments})


def test_frozen_layers_stay_frozen_through_cutting_and_training() -> None:
    torch.manual_seed(0)
    body = (nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    model = se.with_head(nn.Sequential(*body, nn.Linear(128, 5)).requires_grad_(False), 10)
    data = se.load_data("digits")
    recipe = se.Recipe.named("tune", epochs=1)
    ensemble = se.structured_ensemble(
        model, data, 2, trained=True, selection="mirrored", recipe=recipe, device="cpu", quiet=True
    )
    graph = se.trace(model, data.example())
    for member, subnet in zip(ensemble.members, ensemble.subnets, strict=True):  # type: ignore[arg-type]
        untouched = dict(se.extract(model, graph, subnet).named_parameters())
        for name, parameter in member.named_parameters():
            assert parameter.requires_grad == name.startswith("6.")
            assert torch.equal(parameter, untouched[name]) != name.startswith("6."), name
