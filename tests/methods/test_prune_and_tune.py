"""Prune and Tune: a base, mirrored children cut out of it, one cycle of the learning rate, both costs counted."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.methods import prune_and_tune

RECIPE = se.Recipe(epochs=8, batch_size=64, rate=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(64, hidden=(32, 16))


def made(**arguments: Any) -> se.Ensemble:
    settings = {"recipe": RECIPE, "device": "cpu", "quiet": True, **arguments}
    return prune_and_tune(model(), se.load_data("digits"), 2, **settings)


def test_history_counts_base_and_children() -> None:
    ensemble = made()
    history = ensemble.history
    assert history is not None
    assert history.epochs == 8
    assert [row["epoch"] for row in history.of(2)] == [0, 1, 2, 3, 4, 5]  # the base
    for member in (0, 1):
        assert [row["epoch"] for row in history.of(member)] == [6, 7]
    seconds = [history.epoch(epoch).seconds for epoch in range(8)]
    assert history.seconds == pytest.approx(sum(seconds))
    assert min(seconds) > 0
    assert history.epoch(6).validation_accuracies[0] > 0.8  # the children start from what the base has learned
    first, second = ensemble.subnets
    assert first.overlap(second) == 0


def test_rate_of_the_children_is_one_cycle_below_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[se.Recipe] = []
    namespace = prune_and_tune.__globals__
    train = namespace["train"]

    def record(ensemble: se.Ensemble, data: se.Data, recipe: se.Recipe, *others: Any, **keywords: Any) -> Any:
        used.append(recipe)
        return train(ensemble, data, recipe, *others, **keywords)

    monkeypatch.setitem(namespace, "train", record)
    made(tune_epochs=5, peak_rate=0.04)
    base, children = used
    assert (base.epochs, base.rate, children.epochs) == (3, 0.1, 5)
    rates = [children.rate_at(step, 20) for step in range(100)]
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(0.04, rel=1e-3)
    assert 8 <= peak <= 10  # a tenth of the steps
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-4


def test_by_default_a_quarter_of_the_epochs_tunes_at_half_of_the_rate() -> None:
    history = made(recipe=se.Recipe(epochs=5, batch_size=64, rate=0.1)).history
    assert history is not None
    assert len(history.of(2)) == 3
    first, last = (row["rate"] for row in history.of(0))  # a quarter of five, rounded up
    steps = 21  # 1,295 samples in batches of 64
    done = ((steps - 1) / steps - 0.2) / (2 - 0.2)  # of the cosine, after a rise of a tenth of two epochs
    assert first == pytest.approx(0.05 * (1 + math.cos(math.pi * done)) / 2)
    assert last < 0.001


def test_statistics_of_children_are_measured_anew_before_they_are_tuned() -> None:
    """At a rate of zero and with momentum 0, batch norm ends with the statistics that tuning began with."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32, momentum=0.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))
    data, recipe = se.load_data("digits"), se.Recipe(epochs=2, batch_size=64)
    ensemble = prune_and_tune(network, data, 2, recipe=recipe, tune_epochs=1, peak_rate=0.0, device="cpu", quiet=True)
    x = data.prepare(data.train.inputs[data.train.index], torch.float32)
    for member in ensemble.members:
        before_norm = member[1](x.flatten(1)).detach()  # type: ignore[index, operator]
        torch.testing.assert_close(member[2].running_mean, before_norm.mean(0), rtol=0, atol=0.05)  # type: ignore[index]
        assert not torch.equal(member[2].running_mean, torch.zeros(16))  # type: ignore[index]


@pytest.mark.parametrize("selection", ["mirrored", "random"])
def test_children_are_cut_out_of_the_trained_base(selection: str) -> None:
    untuned = made(tune_epochs=1, peak_rate=0.0, selection=selection)  # a rate of zero leaves them as they are
    base, data = se.Ensemble([model()]), se.load_data("digits")
    se.train(base, data, se.Recipe(epochs=7, batch_size=64, rate=0.1), "cpu", numbers=[2], quiet=True)
    graph = se.trace(base.members[0], data.example())
    subnets = se.select(graph, prune=0.5, selection=selection, members=2)  # type: ignore[arg-type]
    assert list(untuned.subnets or ()) == subnets
    for member, subnet in zip(untuned.members, subnets, strict=True):
        expected = se.extract(base.members[0], graph, subnet)
        assert all(torch.equal(*pair) for pair in zip(member.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_run_killed_at_any_epoch_resumes_to_the_same_weights(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an epoch of the base, after its last, and after an epoch of the children."""
    settings = {"recipe": se.Recipe(epochs=4, batch_size=64), "tune_epochs": 2}
    whole = made(**settings)
    replace, left = os.replace, stop

    def killed(temporary: Path, path: Path) -> None:
        nonlocal left
        replace(temporary, path)
        left -= path.name.startswith("checkpoint")
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        made(folder=tmp_path, **settings)
    monkeypatch.setattr(os, "replace", replace)
    resumed = made(folder=tmp_path, **settings)
    assert all(torch.equal(*pair) for pair in zip(resumed.parameters(), whole.parameters(), strict=True))
    assert resumed.history is not None
    assert resumed.history.epochs == 4
    assert len(resumed.history.rows) == 2 + 2 * 2


def test_table_has_the_cost_of_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    made(quiet=False)
    base, ensemble = capsys.readouterr().err.splitlines()[-2:]
    assert base.startswith("base ")
    assert base.split()[-1].isdigit()
    assert int(ensemble.split()[-1]) >= int(base.split()[-1])


def test_regression_keeps_the_units_of_the_base() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    data = se.Data.from_arrays(x, 1000 + 200 * x[:, 0], test=(x, 1000 + 200 * x[:, 0]))
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    recipe = se.Recipe.named("regression", epochs=8, batch_size=32)
    ensemble = prune_and_tune(network, data, 2, recipe=recipe, device="cpu", quiet=True)
    assert se.evaluate(ensemble, data)["reg/rmse"] < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tune_epochs": 0}, "tune_epochs must be a whole number from 1 to the recipe's 8 epochs, not 0"),
        ({"tune_epochs": True}, "tune_epochs must be .* not True"),
        ({"tune_epochs": 9}, "tune_epochs must be .* not 9"),
        ({"peak_rate": -1.0}, "peak_rate must be a finite number of at least 0"),
        ({"selection": "learned"}, "selection must be one of 'mirrored', 'random', not 'learned'"),
        ({"prune": 0.0}, 'selection="mirrored" needs members that keep a part'),
    ],
)
def test_invalid_arguments_are_errors_before_any_training(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prune_and_tune.__globals__, "train", lambda *_, **__: pytest.fail("it trains"))
    with pytest.raises(ValueError, match=message):
        made(**arguments)
