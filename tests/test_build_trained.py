"""structured_ensemble() of a network that is already trained: it is recognised, and keeps what it has learned."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles import build
from tests.support.networks import network


def fit(model: nn.Module, data: se.Data, epochs: int) -> None:
    se.train(se.Ensemble([model]), data, se.Recipe(epochs=epochs, batch_size=32), device="cpu", quiet=True)


@pytest.fixture(scope="module")
def data() -> se.Data:
    return se.load_data("digits")


@pytest.fixture(scope="module")
def base(data: se.Data) -> nn.Module:
    model = network(0, width=32, dropout=0.1)
    fit(model, data, 3)
    return model


def built(model: nn.Module, data: se.Data, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """Run structured_ensemble without training; return the recipe, the initial scales, the ensemble and its base."""
    seen: dict[str, Any] = {"initial": None}
    search = build.learn_scales

    def learn(*positional: Any, **keywords: Any) -> Any:
        seen["initial"] = keywords["initial"]
        return search(*positional, **{**keywords, "epochs": 0})

    monkeypatch.setattr(build, "learn_scales", learn)
    monkeypatch.setattr(build, "train", lambda ensemble, data, recipe, *_, **__: seen.update(recipe=recipe))
    seen["ensemble"] = se.structured_ensemble(model, data, 2, device="cpu", quiet=True, **arguments)
    return seen


def test_trained_network_gets_gentle_defaults(base: nn.Module, data: se.Data, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = built(base, data, monkeypatch)
    assert (seen["recipe"], seen["initial"]) == (se.Recipe.named("tune"), "N(1,0.1)")
    untrained = built(network(0), data, monkeypatch)
    assert (untrained["recipe"], untrained["initial"]) == (se.Recipe.named("modern"), "N(0,1)")


def test_arguments_of_the_caller_win(base: nn.Module, data: se.Data, monkeypatch: pytest.MonkeyPatch) -> None:
    own = se.Recipe(epochs=7)
    seen = built(base, data, monkeypatch, recipe=own, initial="U(0,1)")
    assert (seen["recipe"], seen["initial"]) == (own, "U(0,1)")
    seen = built(base, data, monkeypatch, trained=False)
    assert (seen["recipe"], seen["initial"]) == (se.Recipe.named("modern"), "N(0,1)")
    seen = built(network(0), data, monkeypatch, trained=True)
    assert (seen["recipe"], seen["initial"]) == (se.Recipe.named("tune"), "N(1,0.1)")
    assert built(base, data, monkeypatch, reinit=True)["recipe"] == se.Recipe.named("modern")


def test_statistics_of_every_member_are_measured_anew(
    base: nn.Module, data: se.Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two convolutions, so that the second norm sees the cut."""
    torch.manual_seed(0)
    deep = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    fit(deep, data, 3)
    accuracies = {}
    for trained in (True, False):
        ensemble = built(deep, data, monkeypatch, trained=trained, selection="mirrored")["ensemble"]
        ensemble.adopt(data)
        accuracies[trained] = se.evaluate(ensemble, data)["cls/member_accuracy"]
        if trained:
            for member in ensemble.members:
                expected = se.recalibrate_statistics(without_statistics(member), data)
                assert torch.allclose(member[4].running_mean, expected[4].running_mean, atol=1e-6)
    assert accuracies[True] > accuracies[False] + 0.05


def without_statistics(model: nn.Module) -> nn.Module:
    """Copy a model, with the running statistics of a new batch norm."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    return copied


def test_run_says_what_it_decided_and_ends_in_a_table(
    base: nn.Module, data: se.Data, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = se.Recipe.named("tune", epochs=1)
    ensemble = se.structured_ensemble(base, data, 2, selection="mirrored", recipe=recipe, device="cpu")
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("the model counts as trained: ")
    table = shown[-4:]
    assert table[0].split() == ["test", "split", "accuracy", "NLL", "ECE", "memory", "seconds"]
    figures = se.evaluate(ensemble, data)
    cells = table[3].removeprefix("ensemble of 2").split()
    assert cells[:2] == [f"{100 * figures['cls/accuracy']:.2f}%", f"{figures['cal/nll']:.4f}"]
    assert cells[3] == f"{ensemble.overhead(base):.2f}"
    assert table[2].split()[-2:] == ["1.00", "–"]
    se.structured_ensemble(network(0), data, 2, selection="mirrored", recipe=recipe, device="cpu")
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("the model counts as not trained: ")
    assert "memory" not in "".join(shown[1:])


def test_run_resumes_with_the_same_decision(base: nn.Module, data: se.Data, tmp_path: Path) -> None:
    recipe = se.Recipe.named("tune", epochs=1)
    settings: dict[str, Any] = {"selection": "mirrored", "recipe": recipe, "device": "cpu", "quiet": True}
    first = se.structured_ensemble(base, data, 2, folder=tmp_path, **settings)
    again = se.structured_ensemble(base, data, 2, folder=tmp_path, trained=True, **settings)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"differs in trained \(there True, here None\)"):
        se.structured_ensemble(base, data, 2, folder=tmp_path, trained=False, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trained": "yes"}, "trained must be one of True, False, 'auto', not 'yes'"),
        ({"trained": True, "reinit": True}, "trained=True must not be given together with reinit=True"),
        ({"selection": "mirrored", "prune": 0.0}, 'selection="mirrored" needs members that keep a part'),
        ({"selection": "mirrored", "memory": 9.0}, 'selection="mirrored" needs members that keep a part'),
    ],
)
def test_invalid_arguments_are_errors(base: nn.Module, data: se.Data, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.structured_ensemble(base, data, 2, quiet=True, **arguments)


def test_trained_network_of_other_classes_is_refused(data: se.Data) -> None:
    message = r"trained=True needs a model for the classes of data, 10, but it has 12 outputs: with_head\(model, 10\)"
    with pytest.raises(ValueError, match=message):
        se.structured_ensemble(se.zoo.mlp(64, 12), data, 2, trained=True, quiet=True)
    with pytest.raises(ValueError, match=r"model has 7 outputs, but data has 10 classes: .* with_head\(model, 10\)"):
        se.structured_ensemble(se.zoo.mlp(64, 7), data, 2, trained=True, quiet=True)


def test_network_with_more_outputs_than_classes_warns_unless_it_is_said_to_be_new(
    data: se.Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most such networks are trained for other data, and a recipe for new networks would undo that."""
    message = r"model has 12 outputs, but data has 10 classes: it counts as not trained.* with_head\(model, 10\)"
    with pytest.warns(UserWarning, match=message) as caught:
        seen = built(se.zoo.mlp(64, 12), data, monkeypatch)
    assert caught[0].filename == __file__
    assert seen["recipe"] == se.Recipe.named("modern")
    with warnings.catch_warnings(action="error"):
        built(se.zoo.mlp(64, 12), data, monkeypatch, trained=False)
        built(se.zoo.mlp(64, 12), data, monkeypatch, loss=lambda outputs, targets: outputs.mean())
