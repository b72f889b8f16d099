"""Networks as users write them: they work, or one sentence says what is in the way and what to do about it."""

import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se

torch.manual_seed(0)
X = torch.randn(96, 6)
DATA = se.Data.from_arrays(X, (X[:, 0] > 0).long())


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).relu())


class Bare(nn.Module):
    """Has parameters and no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 6)), nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.first).relu(), self.second)


class Skipping(Base):
    """Skips a layer by a random number of Python's, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        if not self.training or random.random() < 0.5:
            features = features + self.block(features)
        return self.head(features)  # type: ignore[no-any-return]


def ensemble_of(model: nn.Module, data: se.Data = DATA, **settings: Any) -> se.Ensemble:
    return se.structured_ensemble(
        model, data, members=2, recipe=se.Recipe(epochs=1), search_epochs=1, quiet=True, **settings
    )


@pytest.mark.parametrize("diversity", ["mmd", "overlap", None])
def test_network_without_layers_is_cut_by_the_magnitude_of_its_weights(diversity: Any) -> None:
    model = Bare()
    ensemble = ensemble_of(model, diversity=diversity)
    largest = model.first.detach().abs().mean(1).topk(8).indices.sort().values.tolist()
    assert [subnet.kept["first"] for subnet in ensemble.subnets or ()] == [tuple(largest)] * 2


def test_network_that_was_compiled_in_place_is_copied_without_its_compiled_code() -> None:
    torch.manual_seed(0)
    plain, compiled = Base(), Base()
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(backend="eager")
    one, other = ensemble_of(plain), ensemble_of(compiled)
    assert torch.equal(one.predict_proba(X), other.predict_proba(X))
    assert all(member._compiled_call_impl is None for member in other.members)


def test_branch_drawn_from_pythons_random_state_is_the_same_whenever_code_is_tried() -> None:
    """Tracing and cutting once took different branches, which was an error, or not, by luck."""
    random.seed(1)
    state = random.getstate()
    graph = se.trace(Skipping(), X[:2])
    assert random.getstate() == state
    for seed in range(4):
        random.seed(seed)
        assert se.trace(Skipping(), X[:2]).prunable == graph.prunable == {"body.0": 16, "block.0": 16}
        ensemble_of(Skipping(), selection="random")


@dataclass
class Outputs:
    logits: Tensor


class Returning(Base):
    def forward(self, x: Tensor) -> Outputs:
        return Outputs(super().forward(x))


class Autocast(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def locked() -> nn.Module:
    model = Base()
    model.body.lock = threading.Lock()
    return model


def wrapped_inside() -> nn.Module:
    model = Base()
    model.body = torch.compile(model.body, backend="eager")  # type: ignore[assignment]
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Base()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(Base(), backend="eager"), r"wrapped by torch\.compile.*inside, model\._orig_mod,"),
        (wrapped_inside, r"wrapped by torch\.compile.*inside, model\.body\._orig_mod,"),
        (locked, r"model cannot be copied.*its attribute body\.lock refuses copy\.deepcopy"),
        (on_meta, r"parameters on the meta device.*model\.to_empty"),
        (
            Returning,
            r"Outputs'> in output, which is not a known type\. \(Let it return a tensor, a tuple or a dict\.\)$",
        ),
        (Autocast, r"no layers were found in its graph.*torch\.autocast"),
        (lambda: nn.Sequential(Base(), nn.Unflatten(1, (2, 1))), r"logits \(batch, classes\).*not \('batch', 2, 1\)"),
        (lambda: nn.Sequential(Base(), nn.Flatten(0)), r"logits \(batch, classes\).*not \('batch',\)"),
    ],
)
def test_network_that_cannot_be_used_is_refused_with_a_reason(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ensemble_of(make())


class TakesOneDict(Base):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(batch["x"])


def test_dict_that_is_no_keyword_arguments_is_explained() -> None:
    data = se.Data.from_arrays({"x": X}, (X[:, 0] > 0).long())
    with pytest.raises(ValueError, match=r"Inputs in a dict reach it as keyword arguments: x\."):
        ensemble_of(TakesOneDict(), data)


def test_images_without_channels_are_explained() -> None:
    data = se.Data.from_arrays(torch.rand(40, 8, 8), torch.arange(40) % 2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(ValueError, match=r"images without channels, x\[:, None\] gives them one"):
        ensemble_of(model, data)


@pytest.mark.parametrize("value", [None, 0.5])
def test_loss_that_returns_no_tensor_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=f"loss must return a tensor of one number, .*, not {value}"):
        ensemble_of(Base(), selection="random", loss=lambda outputs, targets: value)
