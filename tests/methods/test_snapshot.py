"""Snapshot ensembles against a plain loop over cycles."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import structured_ensembles as se


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))


def few_digits() -> se.Data:
    data = se.load_data("digits")
    return se.Data.from_arrays(data.train.inputs[:300], data.train.targets[:300], classes=10, name="few")


def test_two_cycles_equal_a_plain_loop() -> None:
    """The training split is one batch, so that its order does not matter."""
    few, model = few_digits().train, network()
    wrong = (few.inputs, (few.targets + 1) % 10)  # training makes it worse, so the best epoch is not the last
    data = se.Data.from_arrays(few.inputs, few.targets, validation=wrong, classes=10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Snapshots must ignore all of these: warm-up, step schedule, early stop, best epoch.
    recipe = se.Recipe(
        epochs=8, batch_size=1000, rate=0.2, weight_decay=1e-3, warmup=2, schedule="step", milestones=(1,), patience=1
    )
    ensemble = se.methods.snapshot_ensemble(model, data, 2, recipe=recipe, seed=3, quiet=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    plain = network()
    inputs, targets = next(iter(data.batches("train", 1000)))
    assert len(inputs) == len(data.train)
    for cycle in range(2):
        optimizer = torch.optim.SGD(plain.parameters(), 0.2, 0.9, weight_decay=1e-3, nesterov=True)
        plain.train()
        for epoch in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * epoch / 4))
            loss = F.cross_entropy(plain(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for name, tensor in ensemble.members[cycle].state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    scores = [row["validation_accuracy"] for row in ensemble.history.of(0)]
    assert scores[-1] < max(scores)
    assert ensemble.classes == data.classes
    assert ensemble.threshold is not None
    assert not any(member.training for member in ensemble.members)


def test_history_joins_cycles_and_rates_restart() -> None:
    recipe = se.Recipe(epochs=6, batch_size=90, rate=0.3)
    ensemble = se.methods.snapshot_ensemble(network(), few_digits(), 3, recipe=recipe, quiet=True)
    rows = ensemble.history.rows
    assert [row["epoch"] for row in rows] == list(range(6))
    assert [row["member"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert ensemble.history.epochs == 6
    assert ensemble.history.seconds == pytest.approx(sum(row["seconds"] for row in rows))
    last_of_first = 0.15 * (1 + math.cos(math.pi * 2 / 6))  # 270 samples: three steps in an epoch, six in a cycle
    last_of_second = 0.15 * (1 + math.cos(math.pi * 5 / 6))
    assert [row["rate"] for row in rows] == pytest.approx([last_of_first, last_of_second] * 3)


@pytest.mark.parametrize(("epochs", "cycle", "expected"), [(4, None, 2), (5, None, 2), (9, 1, 1), (1, 2, 2)])
def test_cycle_length_follows_epochs_and_members(epochs: int, cycle: int | None, expected: int) -> None:
    recipe = se.Recipe(epochs=epochs, batch_size=300)
    ensemble = se.methods.snapshot_ensemble(network(), few_digits(), 2, recipe=recipe, cycle=cycle, quiet=True)
    assert ensemble.history.epochs == 2 * expected


def test_default_cycle_has_at_most_fifty_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.methods import snapshot

    asked: list[se.Recipe] = []

    def train(_ensemble: se.Ensemble, _data: se.Data, recipe: se.Recipe, *_: object, **__: object) -> se.History:
        asked.append(recipe)
        return se.History()

    monkeypatch.setattr(snapshot, "train", train)
    for cycle, epochs in ((None, 50), (70, 70)):
        se.methods.snapshot_ensemble(network(), few_digits(), 2, recipe=se.Recipe(epochs=300), cycle=cycle, quiet=True)
        assert {recipe.epochs for recipe in asked[-2:]} == {epochs}


def test_too_few_epochs_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"cycle must be .* not 0; by default it is the recipe's 2 epochs divided"):
        se.methods.snapshot_ensemble(network(), few_digits(), 3, recipe=se.Recipe(epochs=2), quiet=True)
    with pytest.raises(ValueError, match=r"cycle must be .* not 1\.5"):
        se.methods.snapshot_ensemble(network(), few_digits(), 3, cycle=1.5, quiet=True)
