"""Inputs that an ensemble or a learner cannot take: one error that says what it takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.continual import StructuredLearner, split_tasks

SETTINGS: dict[str, Any] = {"recipe": se.Recipe(epochs=0), "search_epochs": 0, "device": "cpu", "quiet": True}
rng = np.random.default_rng(0)


def columns() -> tuple[se.Ensemble, nn.Module]:
    data = se.Data.from_arrays(rng.normal(size=(60, 8)), np.arange(60) % 3)
    model = se.zoo.mlp(8, 3, hidden=(16, 16))
    return se.structured_ensemble(model, data, 2, **SETTINGS), model


def images() -> tuple[se.Ensemble, nn.Module]:
    data = se.Data.from_arrays(rng.integers(0, 256, (40, 3, 16, 16), dtype=np.uint8), np.arange(40) % 2)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    return se.structured_ensemble(model, data, 2, **SETTINGS), model


@pytest.mark.parametrize("method", ["predict", "predict_proba", "logits", "uncertainty"])
def test_wrong_number_of_columns_is_an_error(method: str, tmp_path: Path) -> None:
    ensemble, model = columns()
    ensemble.save(tmp_path / "file.safetensors")
    for predictor in (ensemble, se.Ensemble.load(tmp_path / "file.safetensors", model=model)):
        assert len(predictor.logits(rng.normal(size=(5, 8)))[0]) == 5
        with pytest.raises(
            ValueError, match=r"x must be a batch of inputs of shape \(8,\), 8 columns, not of shape \(3,\)"
        ):
            getattr(predictor, method)(rng.normal(size=(300, 3)))
        with pytest.raises(ValueError, match=r"not of shape \(8, 1\)"):
            getattr(predictor, method)(rng.normal(size=(4, 8, 1)))


def test_wrong_number_of_channels_is_an_error_and_larger_images_are_accepted() -> None:
    ensemble, _ = images()
    assert ensemble.predict(rng.integers(0, 256, (4, 3, 24, 20), dtype=np.uint8)).shape == (4,)
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 16, 16\), 3 channels, not of shape \(1, 16, 16\)"):
        ensemble.predict(np.zeros((4, 1, 16, 16), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"not of shape \(16, 16, 3\)"):  # channels last
        ensemble.predict(np.zeros((4, 16, 16, 3), dtype=np.uint8))


def test_unsupported_image_size_is_an_error() -> None:
    data = se.Data.from_arrays(rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8), np.arange(40) % 2)
    ensemble = se.structured_ensemble(se.zoo.mlp(64, 2, hidden=(8,)), data, 2, **SETTINGS)
    with pytest.raises(
        ValueError, match=r"shape \(1, 8, 8\), 1 channel; the network fails on shape \(1, 9, 9\): mat1 and mat2"
    ):
        ensemble.predict(np.zeros((4, 1, 9, 9), dtype=np.uint8))


class Text(nn.Module):
    """Embed words and positions by two tables."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.positions, self.words = nn.Embedding(12, 16), nn.Embedding(words, 16)
        self.hidden, self.last = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        embedded = self.words(ids) + self.positions(positions)
        return self.last(self.hidden(embedded.mean(1)).relu())


@pytest.mark.parametrize("method", ["structured", "mc-dropout", "batch-ensemble"])
def test_ids_out_of_range_are_an_error(method: str, tmp_path: Path) -> None:
    ids = rng.integers(0, 40, (60, 10))
    data = se.Data.from_arrays(ids, ids[:, 0] % 2, ids=True)
    model = Text()
    settings = SETTINGS if method == "structured" else {name: SETTINGS[name] for name in ("recipe", "device", "quiet")}
    ensemble = se.methods.METHODS[method](model, data, members=2, **settings)
    ensemble.save(tmp_path / "file.safetensors")
    for predictor in (ensemble, se.Ensemble.load(tmp_path / "file.safetensors", model=model)):
        assert predictor.predict(np.full((3, 7), 49)).shape == (3,)  # another length, an id that training did not have
        with pytest.raises(ValueError, match=r"x must be ids from 0 to 49, the rows of .* embedding, not 3 to 50"):
            predictor.predict(np.array([[3, 50]]))
        with pytest.raises(ValueError, match="not -1 to 3"):
            predictor.predict_proba(np.array([[3, -1]]))
        with pytest.raises(ValueError, match=r"ids of shape \(10,\); the network fails on shape \(13,\)"):
            predictor.predict(np.zeros((2, 13), dtype=int))  # more positions than it has


def test_unknown_ids_in_data_are_refused_before_any_work() -> None:
    ids = rng.integers(0, 40, (60, 10))
    for x in (ids + 20, np.where(ids == 39, 50, ids), ids - 1):
        data = se.Data.from_arrays(x, ids[:, 0] % 2, ids=True)
        low, high = x[data.train.index].min(), x[data.train.index].max()
        for call in (
            lambda data: se.structured_ensemble(Text(), data, 2, **SETTINGS),
            lambda data: se.train(se.Ensemble([Text()]), data, se.Recipe(epochs=0), "cpu", quiet=True),
        ):
            message = f"knows the ids from 0 to 49, but those of the train split reach from {low} to {high}"
            with pytest.raises(ValueError, match=message):
                call(data)


def test_errors_of_the_network_pass_through() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("out of order")

    ensemble = se.Ensemble([Failing(8, 2)])
    ensemble.input_shape = (8,)
    with pytest.raises(RuntimeError, match=r"^out of order$"):
        ensemble.predict(np.zeros((2, 8)))


def test_learners_check_inputs_like_ensembles(tmp_path: Path) -> None:
    tasks = split_tasks(se.load_data("digits"), 5)
    backbone = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    learner = StructuredLearner(backbone, epochs=1, search_epochs=1, device="cpu", quiet=True)
    learner.learn(tasks[0])
    learner.save(tmp_path / "learner.safetensors")
    loaded = StructuredLearner.load(tmp_path / "learner.safetensors", backbone=backbone, device="cpu")
    for predictor in (learner, loaded):
        assert predictor.predict(np.zeros((2, 1, 9, 9), dtype=np.uint8), task=0).shape == (2,)
        for call in (predictor.predict, predictor.logits):
            with pytest.raises(ValueError, match=r"inputs of shape \(1, 8, 8\), 1 channel, not of shape \(3, 8, 8\)"):
                call(np.zeros((2, 3, 8, 8), dtype=np.uint8), task=0)
        with pytest.raises(ValueError, match="not of shape"):
            predictor.infer_task(np.zeros((2, 3, 8, 8), dtype=np.uint8))


def test_volumes_of_another_size_are_accepted() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
    data = se.Data.from_arrays(rng.normal(size=(20, 2, 6, 8, 8)), np.arange(20) % 2)
    ensemble = se.Ensemble([model])
    ensemble.adopt(data)
    assert ensemble.predict(rng.normal(size=(3, 2, 7, 9, 9))).shape == (3,)
    with pytest.raises(ValueError, match="not of shape"):
        ensemble.predict(rng.normal(size=(3, 1, 7, 9, 9)))


def test_pixels_that_are_not_uint8_are_an_error(tmp_path: Path) -> None:
    ensemble, model = images()
    pixels = rng.integers(0, 256, (5, 3, 16, 16), dtype=np.uint8)
    expected = ensemble.predict_proba(pixels)
    ensemble.save(tmp_path / "a.safetensors")
    for same in (ensemble, se.Ensemble.load(tmp_path / "a.safetensors", model=model)):
        torch.testing.assert_close(same.predict_proba(pixels / 255), expected)
        for wrong in (pixels.astype(int), pixels.astype(np.float32)):
            with pytest.raises(ValueError, match=r"as floats in \[0,1\], not (values up to 25[0-9]|int64)"):
                same.predict_proba(wrong)


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((5, 8, 8, 3), r"channels seem to come last; x.permute\(0, 3, 1, 2\) "),
        ((8, 8, 3), r"channels seem to come last; x.permute\(2, 0, 1\)\[None\] "),
        ((3, 8, 8), r"one sample; x\[None\] makes a batch of one"),
        ((5, 2, 8, 8), r"not of shape \(2, 8, 8\)$"),
        ((64,), r"not of shape \(\)$"),
    ],
)
def test_images_of_another_layout_get_a_hint(shape: tuple[int, ...], hint: str) -> None:
    ensemble = se.Ensemble([se.zoo.lenet5(10, in_channels=3)])
    ensemble.input_shape, ensemble.pixels = (3, 8, 8), True
    with pytest.raises(ValueError, match=hint):
        ensemble.predict(torch.zeros(shape, dtype=torch.uint8))


def test_a_single_row_of_columns_gets_a_hint() -> None:
    ensemble = se.Ensemble([torch.nn.Linear(4, 2)])
    ensemble.input_shape = (4,)
    with pytest.raises(ValueError, match=r"one sample; x\[None\]"):
        ensemble.predict(torch.zeros(4))
