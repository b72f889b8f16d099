"""Normalisation: as the user chose, as a trained network expects, and for columns of any scale."""

import logging
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.examination.pretrained import find_normalization
from structured_ensembles.methods import METHODS

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
LABELS = np.arange(20) % 2


def moments(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return images.mean((0, 2, 3)), images.std((0, 2, 3))


@pytest.mark.parametrize(
    ("choice", "mean", "deviation"),
    [
        ("none", 0, 1 / 255),
        (None, 0, 1 / 255),
        ("unit", 0, 1),
        ("auto", *moments(IMAGES / 255)),
        ("standard", *moments(IMAGES / 255)),
        ("imagenet", *IMAGENET),
        (se.Normalization.imagenet(), *IMAGENET),
        ((0.5, 0.25), 0.5, 0.25),
        (IMAGENET, *IMAGENET),
        (np.array(IMAGENET), *IMAGENET),
        (se.Normalization((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)), [0.1, 0.2, 0.3], [1, 2, 3]),
    ],
)
def test_pixels_are_normalised_as_chosen(choice: Any, mean: Any, deviation: Any, tmp_path: Path) -> None:
    data = se.Data.from_arrays(IMAGES, LABELS, validation=0.0, normalization=choice)
    shaped = [np.asarray(values, dtype=np.float64).reshape(-1, 1, 1) for values in (mean, deviation)]
    expected = torch.from_numpy((IMAGES / 255 - shaped[0]) / shaped[1]).float()
    torch.testing.assert_close(next(data.batches("train", 20))[0], expected, rtol=1e-5, atol=1e-5)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    ensemble = se.Ensemble([network])
    ensemble.adopt(data)
    ensemble.save(tmp_path / "file.safetensors")
    with torch.no_grad():
        outputs = network(expected)
    for predictor in (ensemble, se.Ensemble.load(tmp_path / "file.safetensors", model=network)):
        for x in (IMAGES, IMAGES.astype(np.float32) / 255):
            torch.testing.assert_close(predictor.logits(x)[0], outputs, rtol=1e-3, atol=1e-4)


def test_float_images_are_normalised_only_on_request() -> None:
    floats = IMAGES.astype(np.float32) / 255
    for choice, mean, deviation in (
        ("auto", 0, 1),
        ("none", 0, 1),
        ("unit", 0, 1),
        ("standard", *moments(floats.astype(np.float64))),
    ):
        data = se.Data.from_arrays(floats, LABELS, validation=0.0, normalization=choice)
        shaped = [np.asarray(values, dtype=np.float64).reshape(-1, 1, 1) for values in (mean, deviation)]
        expected = torch.from_numpy((floats - shaped[0]) / shaped[1]).float()
        torch.testing.assert_close(next(data.batches("train", 20))[0], expected, rtol=1e-5, atol=1e-5)


def test_every_data_constructor_takes_a_normalization() -> None:
    raw = se.load_data("digits", normalization="none")
    torch.testing.assert_close(raw.example(4), raw.train.inputs[raw.train.index[:4]].float())
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    loader = torch.utils.data.DataLoader(pairs, batch_size=20)
    streamed = se.Data.from_loaders(loader, classes=2, normalization="imagenet")
    read = se.Data.from_datasets(pairs, validation=0.0, normalization="imagenet")
    mean, deviation = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    expected = (torch.from_numpy(IMAGES) / 255 - mean) / deviation
    for data in (streamed, read):
        torch.testing.assert_close(next(data.batches("train", 20))[0], expected)
    torch.testing.assert_close(se.Data.from_loaders(loader, classes=2).example(20), torch.from_numpy(IMAGES) / 255)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("imagnet", "normalization must be one of 'auto', 'none', 'unit', 'standard', 'imagenet', .* not 'imagnet'"),
        ((0.5, 0.0), "deviations above 0"),
        ((0.5, float("nan")), "finite means"),
        (
            ([0.5, 0.5], [1, 1]),
            r"has 2 means and deviations, but inputs of shape \(3, 4, 4\) each need one for all, or 3",
        ),
        ((1, 2, 3), r"pair \(mean, deviation\)"),
        (7, r"pair \(mean, deviation\)"),
    ],
)
def test_invalid_normalization_is_an_error(choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Data.from_arrays(IMAGES, LABELS, normalization=choice)


def test_standardising_a_loader_is_refused() -> None:
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    with pytest.raises(ValueError, match="normalization='standard' needs all samples"):
        se.Data.from_loaders(torch.utils.data.DataLoader(pairs), classes=2, normalization="standard")


# A network that somebody has trained ---------------------------------------------------------------------------------


def dark_on_white(normalization: Any = "auto") -> se.Data:
    """Return digits with most pixels at 255."""
    data = se.load_data("digits")
    images, labels = 255 - data.train.inputs, data.train.targets
    test = 255 - data.test.inputs, data.test.targets
    return se.Data.from_arrays(images, labels, test=test, normalization=normalization)


def untrained(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))


@cache
def trained(scale: float, shift: float) -> nn.Module:
    """Train a network in plain PyTorch on pixels from 0 to 255 times `scale`, plus `shift`."""
    model, data = untrained(), dark_on_white()
    images, labels = data.train.inputs[data.train.index] * scale + shift, data.train.targets[data.train.index]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(3):
        for x, y in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


TRAINED = {
    "normalization='unit'": (1 / 255, 0.0, None),
    "normalization='none'": (1.0, 0.0, se.Normalization((0.0,), (1 / 255,))),
    "normalization=(0.5, 0.5)": (2 / 255, -1.0, se.Normalization((0.5,), (0.5,))),
}


@pytest.mark.parametrize("choice", TRAINED)
def test_normalization_of_a_trained_network_is_detected(choice: str) -> None:
    scale, shift, expected = TRAINED[choice]
    model, data = trained(scale, shift), dark_on_white()
    right = (model(data.test.inputs * scale + shift).argmax(-1) == data.test.targets).double().mean()
    assert right > 0.9
    with pytest.warns(UserWarning, match=f"trained on inputs as {choice.replace('(', '.').replace(')', '.')} gives"):
        fitted = find_normalization(model, data, "cpu")
    assert fitted.normalization == expected
    accuracy = (model(fitted.prepare(data.test.inputs)).argmax(-1) == data.test.targets).double().mean()
    assert accuracy == pytest.approx(float(right), abs=0.01)


def test_structured_ensemble_uses_the_detected_normalization(tmp_path: Path) -> None:
    model, data = trained(1 / 255, 0.0), dark_on_white()
    settings: dict[str, Any] = {"device": "cpu", "quiet": True, "recipe": se.Recipe(epochs=0)}
    with pytest.warns(UserWarning, match="normalization='unit'"):
        ensemble = se.structured_ensemble(model, data, 3, 0.1, search_epochs=1, **settings)
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.9
    ensemble.save(tmp_path / "file.safetensors")
    loaded = se.Ensemble.load(tmp_path / "file.safetensors", model=model)
    assert torch.equal(loaded.predict(data.test), ensemble.predict(data.test))
    chosen = dark_on_white("standard")  # chosen by the user, right or wrong
    kept = se.structured_ensemble(model, chosen, 3, 0.1, search_epochs=1, trained=False, **settings)
    assert kept.normalization == chosen.normalization
    assert se.evaluate(kept, chosen)["cls/accuracy"] < 0.8


@pytest.mark.parametrize(
    "method", ["single", "deep", "snapshot", "batch-ensemble", "mc-dropout", "magnitude", "prune-and-tune", "taught"]
)
def test_every_method_that_inherits_weights_detects_the_normalization(method: str) -> None:
    recipe = se.Recipe(epochs=2 if method == "snapshot" else 0)
    with pytest.warns(UserWarning, match="normalization='unit'"):
        ensemble = METHODS[method](
            trained(1 / 255, 0.0), dark_on_white(), members=2, recipe=recipe, device="cpu", quiet=True
        )
    assert ensemble.normalization is None


def test_train_detects_the_normalization_of_a_trained_network() -> None:
    with pytest.warns(UserWarning, match="normalization='unit'"):
        se.train(se.Ensemble([trained(1 / 255, 0.0)]), dark_on_white(), se.Recipe(epochs=0), "cpu", quiet=True)


class Counted(nn.Sequential):
    samples = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.samples += len(x)
        return super().forward(x)


def test_untrained_network_keeps_the_default_normalization_quickly() -> None:
    data = dark_on_white()
    for seed in range(10):
        model = Counted(*untrained(seed))
        Counted.samples = 0
        before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
        fitted = find_normalization(model, data, "cpu")
        assert fitted.normalization == data.normalization
        assert Counted.samples <= 4 * 512
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert find_normalization(model, fitted, "cpu") is fitted  # no second look


def test_random_features_are_not_taken_for_a_trained_network() -> None:
    """The classes are so easy that some untrained networks are right nine times in ten."""
    x, y = np.random.default_rng(0).integers(0, 100, (600, 1, 8, 8)), np.arange(600) % 2
    data = se.Data.from_arrays((x + 100 * y[:, None, None, None]).astype(np.uint8), y)
    lucky = 0
    for seed in range(40):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
        lucky += float((model(data.train.inputs / 255).argmax(-1) == data.train.targets).double().mean()) > 0.9
        assert find_normalization(model, data, "cpu").normalization == data.normalization
    assert lucky


# Columns -------------------------------------------------------------------------------------------------------------

X, Y = load_breast_cancer(return_X_y=True)
ORDER = np.random.default_rng(0).permutation(len(X))
X, Y = X[ORDER], Y[ORDER]


def cancer(scaled: bool = False, **settings: Any) -> se.Data:
    x = (X - X[:400].mean(0)) / X[:400].std(0) if scaled else X
    return se.Data.from_arrays(x[:400], Y[:400], test=(x[400:], Y[400:]), **settings)


def small() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(30, 2, hidden=(32, 32))


def test_columns_of_any_scale_are_learned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "structured_ensembles"):
        data = cancer()
    assert "30 columns are standardised" in caplog.text
    assert "columns standardised" in repr(data)
    recipe = se.Recipe.named("modern", epochs=20)
    ensemble = se.structured_ensemble(small(), data, 2, recipe=recipe, search_epochs=1, device="cpu", quiet=True)
    assert se.evaluate(ensemble, data)["cls/accuracy"] >= 0.93
    assert float((ensemble.predict(X[400:]).numpy() == Y[400:]).mean()) >= 0.93


def test_columns_are_standardised_by_training_samples_and_saved(tmp_path: Path) -> None:
    data = cancer(validation=0.25)
    train = X[:400].astype(np.float32)[data.train.index].astype(np.float64)
    expected = torch.from_numpy((X[400:].astype(np.float32) - train.mean(0)) / train.std(0)).float()
    network = small()
    ensemble = se.Ensemble([network])
    se.train(ensemble, data, se.Recipe(epochs=1), "cpu", quiet=True)
    ensemble.save(tmp_path / "file.safetensors")
    loaded = se.Ensemble.load(tmp_path / "file.safetensors", model=network)
    with torch.no_grad():
        outputs = network.eval()(expected)
    for predictor in (ensemble, loaded):
        torch.testing.assert_close(predictor.logits(X[400:])[0], outputs, rtol=1e-3, atol=1e-4)
    # Sums of squares of 4,254 and more do not fit in half precision; standardised columns do.
    half = loaded.half().logits(100 * X[400:])
    assert half.isfinite().all()


def test_columns_of_unit_scale_are_not_standardised() -> None:
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(200, 3)), rng.uniform(size=(200, 3)), cancer(scaled=True).train.inputs):
        data = se.Data.from_arrays(x, np.arange(len(x)) % 2, validation=0.0)
        assert data.normalization is None
        assert "standardised" not in repr(data)
        assert torch.equal(data.example(9), torch.as_tensor(x[:9]).float())
    assert torch.equal(cancer(standardize=False).example(9), torch.from_numpy(X[cancer().train.index[:9]]).float())
    sequences = se.Data.from_arrays(1000 * rng.normal(size=(20, 7, 3)), np.arange(20) % 2)
    assert sequences.normalization is None


def test_constant_column_is_standardised_to_zero() -> None:
    x = np.stack([np.full(50, 1e6 + 0.1), np.arange(50) * 1e-3, np.zeros(50)], axis=1)
    data = se.Data.from_arrays(x, np.arange(50) % 2, validation=0.0)
    batch = data.example(50)
    assert batch[:, [0, 2]].abs().max() < 0.1
    assert torch.allclose(batch[:, 1].std(correction=0), torch.ones(()), atol=1e-4)


def test_classifier_trained_on_raw_columns_gets_raw_columns() -> None:
    x = np.random.default_rng(0).normal([40, 240, 40, 40], 20, (1000, 4))
    data = se.Data.from_arrays(x, (x[:, 0] < 60).astype(np.int64))
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0]]))
        model.bias.copy_(torch.tensor([-60.0, 60]))
    with pytest.warns(UserWarning, match="trained on inputs as standardize=False gives them"):
        assert find_normalization(model, data, "cpu").normalization is None
    assert data.normalization is not None


def test_regression_network_trained_on_raw_columns_gets_raw_columns() -> None:
    x = np.random.default_rng(0).uniform(0, 50, (600, 3)).astype(np.float32)
    y = np.sin(x[:, 0] / 3).astype(np.float32)
    data = se.Data.from_arrays(x, y)

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.rate(x))

    model = Sine()
    find_normalization(model, data, "cpu")  # untrained: no warning, which would be an error
    with torch.no_grad():
        model.rate.weight.copy_(torch.tensor([[1 / 3, 0, 0]]))
        model.rate.bias.zero_()
    with pytest.warns(UserWarning, match="variance explained"):
        assert find_normalization(model, data, "cpu").normalization is None


def test_members_that_always_predict_one_class_warn() -> None:
    recipe = se.Recipe.named("modern", epochs=6, rate=1e-9)
    ensemble = se.Ensemble([small(), small()])
    for member in ensemble.members:
        member.layers[-1].bias.data[1] += 1e6
    with pytest.warns(UserWarning, match=r"every member predicts one class whatever the input \(1\)"):
        se.train(ensemble, cancer(), recipe, "cpu", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        se.train(se.Ensemble([small()]), cancer(), se.Recipe.named("modern", epochs=6), "cpu", quiet=True)
