"""read_digits(): the values and labels are scikit-learn's, read from its file or asked of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from structured_ensembles.data import digits


@pytest.mark.parametrize("moved", [False, True])
def test_images_and_labels_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    if moved:  # a later scikit-learn may keep its file elsewhere
        monkeypatch.setattr(Path, "is_file", lambda _: False)
    values, labels = digits._read_table()
    expected = load_digits()
    assert np.array_equal(values, expected.images)
    assert np.array_equal(labels, expected.target)
    assert labels.dtype == np.int64
    data = digits.read_digits()
    images, targets = (
        torch.cat([data.train.inputs, data.test.inputs]),
        torch.cat([data.train.targets, data.test.targets]),
    )
    pairs = {(image.numpy().tobytes(), int(label)) for image, label in zip(images, targets, strict=True)}
    originals = np.round(expected.images * (255 / 16)).astype(np.uint8)
    assert pairs == {(image.tobytes(), label) for image, label in zip(originals, expected.target.tolist(), strict=True)}
