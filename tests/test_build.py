"""structured_ensemble(): the whole walk in one call."""

import warnings

import pytest
import torch
from torch import nn

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
        ({"memory": 1e-4}, "memory=0.0001 is too little for 2 members of this network"),
        ({"round_to": 0}, "round_to must be"),
        ({"recipe": "modern"}, "recipe must be a Recipe"),
        ({"loss": 3}, r"loss must be a function of \(outputs, targets\), not 3"),
        ({"search_epochs": -1}, "search_epochs must be a whole number of at least 0, not -1"),
        ({"placement": "input", "selection": "random"}, "placement must be one of"),
        ({"strength": -1, "selection": "random"}, "strength must be a finite number"),
    ],
)
def test_invalid_arguments_are_errors_before_the_search(
    wrong: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "learn_scales", lambda *_, **__: pytest.fail("it searches"))
    monkeypatch.setattr(build, "judge_trained", lambda *_, **__: pytest.fail("it measures the network"))
    with pytest.raises((ValueError, TypeError), match=message):
        se.structured_ensemble(se.zoo.mlp(64), se.load_data("digits"), 2, quiet=True, **wrong)  # type: ignore[arg-type]


def test_gradients_that_the_caller_has_switched_off_change_nothing() -> None:
    """As in a notebook that begins with torch.set_grad_enabled(False), and in a function under inference mode."""
    torch.manual_seed(0)
    model, data = se.zoo.mlp(64, hidden=(8, 8)), se.load_data("digits")
    logits = []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            ensemble = se.structured_ensemble(
                model, data, 2, recipe=se.Recipe(epochs=1), search_epochs=1, device="cpu", quiet=True
            )
            logits.append(ensemble.logits(data.test.inputs))  # type: ignore[union-attr]
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        assert not any(parameter.is_inference() for parameter in ensemble.parameters())
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_a_model_made_under_inference_mode_is_cut_and_trained() -> None:
    torch.manual_seed(0)
    data = se.load_data("digits")
    with torch.inference_mode():
        model = se.zoo.mlp(64, hidden=(8, 8))
        se.structured_ensemble(model, data, 2, recipe=se.Recipe(epochs=1), search_epochs=1, device="cpu", quiet=True)
    with pytest.raises(ValueError, match=r"layers\.1\.weight was made under torch\.inference_mode\(\)"):
        se.train(se.Ensemble([model]), data, se.Recipe(epochs=1), quiet=True)


def test_an_ensemble_that_hardly_shrinks_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Sorted(nn.Module):
        """A wide layer that sorting fixes, and a narrow one that can be cut."""

        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.head = nn.Linear(40, 200), nn.Linear(200, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.narrow(self.wide(x).sort(-1).values)))

    x, y = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    data = se.Data.from_arrays(x, y)
    settings = {"members": 2, "prune": 0.5, "selection": "random", "trained": False, "recipe": se.Recipe(epochs=0)}
    ensemble = se.structured_ensemble(Sorted(), data, **settings)
    full = 40 * 200 + 200 + 200 * 4 + 4 + 4 * 3 + 3
    cut = 40 * 200 + 200 + 200 * 2 + 2 + 2 * 3 + 3
    assert (ensemble.base_parameters, ensemble.num_parameters) == (full, 2 * cut)
    sentence = f"members keep 50% of the channels that can be pruned, but {cut / full:.0%} of the network's parameters"
    said = capsys.readouterr().err
    assert said.count(sentence) == 1
    assert "1 of its 3 groups can be pruned" in said
    se.structured_ensemble(Sorted(), data, **settings, quiet=True)
    se.structured_ensemble(se.zoo.mlp(40, 3), data, **settings)
    assert "members keep" not in capsys.readouterr().err


def test_a_given_temperature_stays_where_predictions_are_nan() -> None:
    """Nothing can be fitted to them, and a training must not fail at its end."""
    outlier = torch.cat([torch.zeros(9, 4), torch.full((1, 4), 3e38)])
    data = se.Data.from_arrays(torch.randn(40, 4), torch.arange(40) % 3, validation=(outlier, torch.arange(10) % 3))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.ones_(model[0].weight)  # the sum of an outlier's values overflows
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ensemble = se.structured_ensemble(
            model, data, 2, selection="random", temperature=2.0, recipe=se.Recipe(epochs=1), trained=False, quiet=True
        )
    assert any("no threshold and no conformal sets: predictions must be finite" in str(w.message) for w in warned)
    assert ensemble.temperature == 2.0
    assert ensemble.threshold is None
