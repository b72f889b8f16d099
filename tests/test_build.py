"""structured_ensemble(): the whole walk in one call."""

import pytest
import torch

import structured_ensembles as se
from structured_ensembles import build

RECIPE = se.Recipe(epochs=1)


def test_structured_ensemble_stays_within_its_memory_budget() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.mlp(64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ensemble = se.structured_ensemble(model, data, members=3, memory=1.0, recipe=RECIPE, search_epochs=1, quiet=True)
    assert 0.9 < ensemble.overhead(model) <= 1.0
    assert len(ensemble.subnets) == 3
    assert ensemble.classes == data.classes
    assert ensemble.threshold is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("selection", ["random", "magnitude"])
def test_controls_build_ensembles_without_a_search(selection: str) -> None:
    data = se.load_data("digits")
    model = se.zoo.mlp(64)
    ensemble = se.structured_ensemble(model, data, 2, recipe=RECIPE, selection=selection, reinit=True, quiet=True)
    one, other = ensemble.subnets
    assert (one == other) == (selection == "magnitude")
    weights = [member.layers[1].weight for member in ensemble.members]
    assert not torch.equal(*weights)  # drawn anew, with seeds of their own


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prune": 1.5}, "prune must be"),
        ({"scope": "net"}, "scope must be"),
        ({"prune": 0.5, "memory": 1.0}, "prune= or memory="),
        ({"memory": 1e-4}, "memory"),
        ({"round_to": 0}, "round_to must be"),
        ({"recipe": "modern"}, "recipe must be a Recipe"),
    ],
)
def test_invalid_arguments_are_errors_before_the_search(
    wrong: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "learn_scales", lambda *_, **__: pytest.fail("it searches"))
    with pytest.raises((ValueError, TypeError), match=message):
        se.structured_ensemble(se.zoo.mlp(64), se.load_data("digits"), 2, quiet=True, **wrong)  # type: ignore[arg-type]
