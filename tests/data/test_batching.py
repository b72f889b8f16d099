"""Batches to predict from: data sets are told from `Data` and its splits."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import structured_ensembles as se


class Pictures(Dataset):
    """Twelve grey pictures, with the attribute `train` that torchvision's MNIST and CIFAR-10 have."""

    train = True
    batches = "another name that splits have"

    def __init__(self) -> None:
        self.pixels = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), index % 3


def test_data_sets_may_have_attributes_named_as_those_of_data() -> None:
    pictures = Pictures()
    data = se.Data.from_datasets(pictures, validation=0)
    ensemble = se.Ensemble([torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))])
    ensemble.adopt(data)
    expected = ensemble.predict_proba(pictures.pixels[:, None])
    assert torch.equal(ensemble.predict_proba(pictures), expected)
    assert torch.equal(ensemble.predict_proba(data.train), expected)
    with pytest.raises(TypeError, match="not all of data"):
        ensemble.predict_proba(data)
