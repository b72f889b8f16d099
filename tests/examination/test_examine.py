"""Doubtful outputs and targets: shapes of regressions, values as labels, probabilities as logits."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.examination.pretrained import samples_for_trial

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 4)).astype(np.float32)
Y = X @ np.float32([1, -2, 0.5, 3]) * 100 + 500
FAST: dict[str, Any] = {"device": "cpu", "quiet": True}


def network(outputs: int = 1, *last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs), *last)


# The shape of a regression --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shape", [(600,), (600, 1), (600, 2)])
def test_regression_predicts_in_the_shape_of_its_targets(
    shape: tuple[int, ...], streamed: bool, tmp_path: Path
) -> None:
    targets = np.stack([Y, -Y], axis=1) if shape == (600, 2) else Y.reshape(shape)
    if streamed:
        pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(targets))
        data = se.Data.from_loaders(torch.utils.data.DataLoader(pairs, batch_size=100))
    else:
        data = se.Data.from_arrays(X, targets)
    model = network(2 if shape == (600, 2) else 1)
    ensemble = se.Ensemble([model, model])
    se.train(ensemble, data, se.Recipe.named("regression", epochs=20), **FAST)
    ensemble.save(tmp_path / "file.safetensors")
    for trained in (ensemble, se.Ensemble.load(tmp_path / "file.safetensors", model=model)):
        assert tuple(trained.predict(X).shape) == tuple(trained.spread(X).shape) == shape
        assert trained.logits(X).shape == (2, 600, 2 if shape == (600, 2) else 1)
        errors = trained.predict(X) - torch.from_numpy(targets)
        assert errors.shape == shape
        assert float(errors.square().mean().sqrt()) < 150  # of a deviation of 370


def test_file_of_an_earlier_version_predicts_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It records neither the shape of the targets nor the range of ids."""
    from structured_ensembles.artifact import file as artifact

    def without(path: Path, form: str, version: int, structure: dict[str, Any], tensors: Any) -> int:
        for name in ("target_shape", "id_limit"):
            del structure[name]
        return write(path, form, version, structure, tensors)

    write = artifact.write_container
    ensemble = se.Ensemble([network()], task="regression")
    ensemble.target_shape = ()
    monkeypatch.setattr(artifact, "write_container", without)
    ensemble.save(tmp_path / "file.safetensors")
    loaded = se.Ensemble.load(tmp_path / "file.safetensors", model=network())
    assert (loaded.target_shape, loaded.id_limit) == (None, None)
    assert loaded.predict(X).shape == (600, 1)
    assert torch.equal(loaded.predict(X)[:, 0], ensemble.predict(X))


def test_outputs_of_another_shape_than_targets_keep_their_shape() -> None:
    ensemble = se.Ensemble([network(2)], task="regression")  # mean and variance, perhaps
    ensemble.target_shape = ()
    assert ensemble.predict(X).shape == (600, 2)


# Values as labels -----------------------------------------------------------------------------------------------------


def test_integer_targets_that_look_like_values_warn() -> None:
    prices = rng.permutation(1479)[:600]
    prices[0] = 1478
    with pytest.warns(UserWarning, match=r"taken for 1,479 classes, though .* 600 samples: .* task='regression'"):
        assert se.Data.from_arrays(X, prices).num_classes == 1479
    for settings in ({"task": "regression"}, {"task": "classification"}, {"classes": 1479}):
        se.Data.from_arrays(X, prices, **settings)  # a warning would be an error
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(prices))
    with pytest.warns(UserWarning, match="1,479 classes"):
        se.Data.from_datasets(pairs)


@pytest.mark.parametrize(("classes", "samples"), [(200, 2000), (100, 100), (10, 20), (1000, 20_000)])
def test_ordinary_labels_do_not_warn(classes: int, samples: int) -> None:
    se.Data.from_arrays(np.zeros((samples, 1), dtype=np.float32), np.arange(samples) % classes)


# Probabilities as logits ----------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.end = network(3), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x))


ENDINGS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "softmax": (lambda: network(3, nn.Softmax(dim=1)), "softmax"),
    "softmax as a function": (lambda: Functional(lambda x: x.softmax(-1)), "softmax"),
    "exponential of a log-softmax": (lambda: Functional(lambda x: F.log_softmax(x, -1).exp()), "softmax"),
    "sigmoid": (lambda: network(3, nn.Sigmoid()), "sigmoid"),
    "sigmoid, reshaped": (lambda: Functional(lambda x: torch.sigmoid(x).view(len(x), 3)), "sigmoid"),
    "log-softmax": (lambda: network(3, nn.LogSoftmax(dim=1)), None),
    "logits": (lambda: network(3), None),
    "relu": (lambda: network(3, nn.ReLU()), None),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_network_that_ends_in_softmax_warns(name: str) -> None:
    make, ending = ENDINGS[name]
    data = se.Data.from_arrays(X, np.arange(600) % 3)
    calls = [lambda: se.train(se.Ensemble([make()]), data, se.Recipe(epochs=1), **FAST)]
    if not name.startswith(("softmax as", "exponential", "sigmoid,")):
        recipe = se.Recipe(epochs=1)
        calls.append(lambda: se.structured_ensemble(make(), data, 2, recipe=recipe, search_epochs=1, **FAST))
    for call in calls:
        if ending is None:
            call()  # a warning would be an error
            continue
        with pytest.warns(UserWarning, match=f"ends in a {ending}, .* Remove the {ending} from the model"):
            call()


def test_softmax_warning_is_shown_once_for_search_and_training() -> None:
    data = se.Data.from_arrays(X, np.arange(600) % 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = network(3, nn.Softmax(dim=1))
        se.structured_ensemble(model, data, 2, recipe=se.Recipe(epochs=1), search_epochs=1, **FAST)
    assert len([warning for warning in caught if "softmax" in str(warning.message)]) == 1


def test_regression_that_ends_in_a_sigmoid_does_not_warn() -> None:
    data = se.Data.from_arrays(X, (Y > 500).astype(np.float32), task="regression")
    se.train(se.Ensemble([network(1, nn.Sigmoid())]), data, se.Recipe(epochs=1), **FAST)


# A loss of one's own ------------------------------------------------------------------------------------------------


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().mean()


def absolute_of_columns(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean absolute error of a column, as users who know of broadcasting do."""
    return (outputs[:, 0] - targets).abs().mean()


@pytest.mark.parametrize("loss", [absolute, absolute_of_columns, nn.MSELoss()])
def test_loss_gets_outputs_in_the_shape_of_the_targets(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """(600, 1) minus (600,) is a matrix: a network would learn no more than the mean."""
    y = (Y - Y.mean()) / Y.std()
    data = se.Data.from_arrays(X, y, test=(X, y))
    recipe = se.Recipe.named("regression", epochs=20)
    ensemble = se.structured_ensemble(network(), data, 2, recipe=recipe, loss=loss, search_epochs=1, **FAST)
    figures = se.evaluate(ensemble, data, loss=loss)
    assert figures["reg/rmse"] < 0.3
    errors = ensemble.predict(X).numpy() - y
    expected = np.abs(errors).mean() if not isinstance(loss, nn.Module) else np.square(errors).mean()
    assert figures["reg/loss"] == pytest.approx(float(expected), rel=1e-4)


# What a network has learned -----------------------------------------------------------------------------------------


def test_always_predicting_the_common_class_of_rare_data_does_not_warn() -> None:
    """The probabilities rank well, though every prediction is the common class."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(2000, 4)).astype(np.float32)
    y = (generator.random(2000) < 0.25 / (1 + np.exp(2 - 4 * x[:, 0]))).astype(int)
    data = se.Data.from_arrays(x, y, test=(x, y), validation=0.3)
    recipe = se.Recipe(epochs=8, rate=0.02)
    ensemble = se.methods.deep_ensemble(network(2), data, 2, recipe=recipe, **FAST)  # a warning would be an error
    assert bool((ensemble.logits(x).argmax(-1) == 0).all())  # every member
    assert np.corrcoef(ensemble.predict_proba(x)[:, 1].numpy(), y)[0, 1] > 0.2


def test_warning_of_one_class_covers_outputs_beyond_the_classes() -> None:
    model = nn.Linear(4, 5)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0]))
    data = se.Data.from_arrays(X, (X[:, 0] > 0).astype(int))
    with pytest.warns(UserWarning, match=r"predicts one class whatever the input \(4\)"):
        se.train(se.Ensemble([model]), data, se.Recipe(epochs=5, rate=1e-6), **FAST)


def test_validation_images_may_be_larger_than_those_of_training() -> None:
    """Loaders that crop for training only; the network takes images of any size."""

    def load(samples: int, size: int) -> torch.utils.data.DataLoader:
        images = torch.full((samples, 3, size, size), 128, dtype=torch.uint8)
        images[::2, :, 0] = 255
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, torch.arange(samples) % 2), 20)

    data = se.Data.from_loaders(load(80, 8), validation=load(40, 12), classes=2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    ensemble = se.structured_ensemble(model, data, members=2, search_epochs=1, recipe=se.Recipe(epochs=1), **FAST)
    assert ensemble.predict(data.validation).shape == (40,)
    inputs, targets = samples_for_trial(data, 64)
    assert inputs.shape == (40, 3, 12, 12)
    assert len(targets) == 40


def test_years_as_labels_warn() -> None:
    with pytest.warns(UserWarning, match=r"taken for 2,011 classes, though only 89 of them occur.*task='regression'"):
        se.Data.from_arrays(np.zeros((30000, 2)), 1922 + np.arange(30000) % 89)


def test_state_dict_keeps_the_normalization() -> None:
    data = se.Data.from_arrays(1000 + 50 * X, (X[:, 0] > 0).astype(int))
    ensemble, other = se.Ensemble([network(2)]), se.Ensemble([network(2)])
    se.train(ensemble, data, se.Recipe(epochs=1), **FAST)
    other.load_state_dict(ensemble.state_dict())
    assert other.normalization == ensemble.normalization
    assert torch.equal(other.logits(1000 + 50 * X), ensemble.logits(1000 + 50 * X))


def test_ensemble_of_unknown_normalization_logs_it_in_evaluate(caplog: pytest.LogCaptureFixture) -> None:
    labels = (X[:, 0] > 0).astype(int)
    data = se.Data.from_arrays(1000 + 50 * X, labels, test=(1000 + 50 * X, labels))
    ensemble = se.Ensemble([network(2)])
    caplog.clear()
    se.evaluate(ensemble, data)
    assert "does not know how its inputs are normalised" in caplog.text
    caplog.clear()
    ensemble.adopt(data)
    se.evaluate(ensemble, data)
    assert not caplog.text
