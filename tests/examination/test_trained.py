"""judge_trained(): trained networks are recognised, untrained ones are not, and the reason says why."""

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.examination.trained import judge_trained


@pytest.fixture(scope="module")
def digits() -> se.Data:
    return se.load_data("digits")


def mlp(seed: int, classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return se.zoo.mlp(64, classes, hidden=(32,))


def trained(model: nn.Module, data: se.Data, **changes: object) -> nn.Module:
    recipe = se.Recipe(epochs=4, batch_size=32, **changes)  # type: ignore[arg-type]
    se.train(se.Ensemble([model]), data, recipe, device="cpu", quiet=True)
    return model


def test_trained_classifier_is_recognised_and_not_changed(digits: se.Data) -> None:
    model = trained(mlp(0), digits).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    judgement = judge_trained(model, digits, "cpu")
    assert judgement.trained
    inputs, targets = next(digits.batches("validation", len(digits.validation)))  # type: ignore[arg-type]
    with torch.no_grad():
        accuracy = float((model.eval()(inputs).argmax(-1) == targets).float().mean())
    assert float(judgement.reason.partition("%")[0]) / 100 == pytest.approx(accuracy, abs=1e-3)
    assert f"of {len(targets)} validation samples right" in judgement.reason
    assert "by chance" in judgement.reason
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_untrained_classifiers_are_not_taken_as_trained(digits: se.Data) -> None:
    for seed in range(30):
        assert not judge_trained(mlp(seed), digits, "cpu").trained


def test_lucky_features_are_no_training() -> None:
    """Two classes that one random direction may separate: far above chance without any training."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 2
    x = torch.randn(600, 2, generator=generator) * 0.3 + 3 * labels[:, None]
    data = se.Data.from_arrays(x, labels, standardize=False)
    torch.manual_seed(0)
    untrained = [nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(40)]
    reasons = [judge_trained(model, data, "cpu").reason for model in untrained]
    above_chance = [reason for reason in reasons if "not clearly above chance" not in reason]
    assert above_chance  # the binomial test alone would be fooled
    assert sum(judge_trained(model, data, "cpu").trained for model in untrained) <= 2


@pytest.mark.parametrize("offset", [0.0, 5000.0])
def test_trained_regression_is_recognised_in_either_units(offset: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 6)
    data = se.Data.from_arrays(x, 300 * x[:, 0] * x[:, 1].abs() + offset)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    assert not judge_trained(model, data, "cpu").trained
    trained(model, data, optimizer="adamw", rate=0.01)  # on standardised targets
    judgement = judge_trained(model, data, "cpu")
    assert judgement.trained, judgement.reason
    with torch.no_grad():  # the same network in the units of the targets
        deviation, mean = float(data.train.targets.std()), float(data.train.targets.mean())  # type: ignore[attr-defined]
        model[2].weight.mul_(deviation)
        model[2].bias.mul_(deviation).add_(mean)
    assert judge_trained(model, data, "cpu").trained


def test_network_for_other_classes_is_not_trained_for_these(digits: se.Data) -> None:
    judgement = judge_trained(mlp(0, classes=7), digits, "cpu")
    assert judgement == (False, "it has 7 outputs, the data 10 classes (see with_head)")


def test_network_that_cannot_run_is_left_to_training(digits: se.Data) -> None:
    assert judge_trained(nn.Linear(3, 10), digits, "cpu") == (False, "it cannot be evaluated on the data")
