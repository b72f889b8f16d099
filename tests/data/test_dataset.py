"""Data: splits, batches, normalisation, and its constructors for arrays, datasets and loaders."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import structured_ensembles as se
from structured_ensembles.data.feeds import feed_for


def test_splits_are_stratified_disjoint_and_drawn_once_per_seed() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 10])
    data = se.Data.from_arrays(np.arange(160, dtype=np.float32)[:, None], labels, validation=0.1)
    held_out = data.validation.targets[data.validation.index]
    assert torch.bincount(held_out).tolist() == [10, 5, 1]
    assert set(data.train.index.tolist()) | set(data.validation.index.tolist()) == set(range(160))
    assert len(data.train) + len(data.validation) == 160
    again, other = (se.Data.from_arrays(np.zeros((160, 1)), labels, seed=seed) for seed in (0, 1))
    assert torch.equal(again.validation.index, data.validation.index)
    assert not torch.equal(other.validation.index, data.validation.index)


def test_uint8_is_normalised_and_floats_are_not() -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 4, 4), dtype=np.uint8)
    data = se.Data.from_arrays(images, np.arange(20) % 2, validation=0.0)
    assert data.validation is None
    (inputs, targets), *_ = data.batches("train", 20)
    reference = images / 255.0
    reference = (reference - reference.mean((0, 2, 3), keepdims=True)) / reference.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(inputs.numpy(), reference, atol=1e-5)
    assert targets.tolist() == [0, 1] * 10
    with pytest.warns(UserWarning, match="floats from 0 to 255"):
        floats = se.Data.from_arrays(images.astype(np.float32), np.arange(20) % 2, validation=0.0)
    assert torch.equal(next(floats.batches("train", 20))[0], torch.from_numpy(images).float())


def test_batches_cover_the_split_in_an_order_drawn_from_the_seed() -> None:
    x, y = np.arange(25, dtype=np.float32)[:, None], np.arange(25) % 5
    data = se.Data.from_arrays(x, y, validation=0.0, standardize=False)
    orders = [torch.cat([x for x, _ in data.batches("train", 4, seed=seed)]).flatten() for seed in (None, 0, 0, (0, 1))]
    assert torch.equal(orders[0], torch.arange(25.0))
    assert torch.equal(orders[1], orders[2])
    assert not torch.equal(orders[1], orders[3])
    assert all(torch.equal(order.sort().values, torch.arange(25.0)) for order in orders)
    assert data.num_batches("train", 4) == 7
    with pytest.raises(ValueError, match="no test split"):
        next(data.batches("test", 4))


def test_example_of_no_samples_is_an_error() -> None:
    data = se.Data.from_arrays(torch.rand(4, 2), torch.arange(4) % 2, validation=0)
    with pytest.raises(ValueError, match="no samples to take a batch of"):
        dataclasses.replace(data, train=dataclasses.replace(data.train, index=data.train.index[:0])).example()


def test_digits_equal_scikit_learns() -> None:
    data = se.load_data("digits")
    assert (data.shape, data.num_classes, data.name) == ((1, 8, 8), 10, "digits")
    assert len(data.train) + len(data.validation) + len(data.test) == 1797
    original = {image.tobytes() for image in np.round(load_digits().images * (255 / 16)).astype(np.uint8)}
    stored = torch.cat([data.train.inputs, data.test.inputs])
    assert {image.numpy().tobytes() for image in stored} == original
    assert torch.equal(se.load_data("digits", seed=1).test.inputs, data.test.inputs)
    with pytest.raises(ValueError, match="name must be one of 'digits'"):
        se.load_data("imagenet")


def test_explicit_splits_and_class_names_are_kept() -> None:
    x, y = np.zeros((6, 2)), np.array([0, 1, 0, 1, 0, 1])
    data = se.Data.from_arrays(x, y, validation=(x[:2], y[:2]), test=(x, y), classes=["cat", "dog"])
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 2, 6)
    assert data.classes == ("cat", "dog")
    assert data.example(3).shape == (3, 2)


class Pictures(torch.utils.data.Dataset):
    """Give PIL images, as torchvision's map-style datasets do."""

    classes = ("dark", "bright")

    def __init__(self, count: int, mode: str = "RGB") -> None:
        self.count, self.mode = count, mode

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new(self.mode, (6, 4), (index, 2, 3) if self.mode == "RGB" else index), index % 2


def test_datasets_of_images_are_stored_as_uint8() -> None:
    data = se.Data.from_datasets(Pictures(10), test=Pictures(4), validation=0.2)
    assert data.train.inputs.shape == (10, 3, 4, 6)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.inputs[7, :, 0, 0].tolist() == [7, 2, 3]
    assert (data.classes, len(data.validation), len(data.test)) == (("dark", "bright"), 2, 4)
    assert se.Data.from_datasets(Pictures(6, "L")).train.inputs.shape == (6, 1, 4, 6)
    floats = torch.utils.data.TensorDataset(torch.rand(8, 3), torch.rand(8))
    assert se.Data.from_datasets(floats).task == "regression"
    with pytest.raises(ValueError, match="train must be a map-style dataset"):
        se.Data.from_datasets(Pictures(0))


def test_loaders_are_streamed_without_being_stored() -> None:
    class Counting(Pictures):
        read = 0

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            Counting.read += 1
            return torch.full((3, 4, 4), index, dtype=torch.uint8), index % 2

    loader = torch.utils.data.DataLoader(Counting(10), batch_size=4, shuffle=True)
    data = se.Data.from_loaders(loader)
    before = Counting.read
    orders = [[int(x[0, 0, 0]) for x, _ in zip_batches(data, seed)] for seed in (1, 1, 2)]
    assert Counting.read == before + 30
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(10))
    assert data.num_batches("train", 999) == 3  # the loader's own
    plain = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 2, 1]))
    with pytest.raises(ValueError, match="classes must be given"):
        se.Data.from_loaders(torch.utils.data.DataLoader(plain, batch_size=2))
    with pytest.raises(ValueError, match="labels from 0 to 1"):
        se.Data.from_loaders(torch.utils.data.DataLoader(plain, batch_size=4), classes=2)


def zip_batches(data: se.Data, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for inputs, targets in data.train.batches(4, seed) for pair in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize(
    ("inputs", "targets", "arguments", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), {}, "inputs must have the shape"),
        (np.zeros((3, 2)), np.zeros(4, int), {}, "equally many samples"),
        (np.zeros((3, 2)), np.array([0, 1, -1]), {}, "targets must be labels from 0 to 1"),
        (np.zeros((3, 2)), np.array([0, 1, 7]), {"classes": 5}, "labels from 0 to 4, but reach from 0 to 7"),
        (np.zeros((3, 2)), np.zeros((3, 2), int), {}, r"targets must have the shape \(samples,\)"),
        (np.full((3, 2), np.nan), np.zeros(3, int), {}, "inputs contain values that are not finite"),
        (np.zeros((3, 2)), np.arange(3), {"classes": "cat"}, r"classes must be a list of names, such as \['cat'\]"),
        (np.zeros((3, 2)), np.arange(3), {"classes": 3.0}, "classes must be a list of names"),
        (np.zeros((3, 2)), np.zeros(3, int), {"validation": 1.5}, "validation must be a share"),
        (np.zeros((3, 2)), np.zeros(3, int), {"test": (np.zeros((3, 5)), np.zeros(3, int))}, "test inputs must be"),
        (np.zeros((3, 2)), np.zeros(3, int), {"test": (np.zeros((3, 2)), np.full(3, 9))}, "test targets must be"),
        (np.zeros((3, 2)), np.array([0.5, 1, 2]), {"task": "classification"}, "whole numbers"),
    ],
)
def test_invalid_arrays_are_errors(inputs, targets, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Data.from_arrays(inputs, targets, **arguments)


def test_repr_of_data_names_its_splits() -> None:
    data = se.load_data("digits")
    assert str(data) == (
        f"Data(digits, 10 classes, train: TensorSplit({len(data.train):,} samples, uint8 of shape (1, 8, 8)), "
        f"validation: TensorSplit({len(data.split('validation'))} samples, uint8 of shape (1, 8, 8)), "
        f"test: TensorSplit({len(data.split('test'))} samples, uint8 of shape (1, 8, 8)))"
    )
    values = torch.randn(20, 3)
    assert str(se.Data.from_arrays(values, values[:, 0], validation=0.0)) == (
        "Data(arrays, regression, train: TensorSplit(20 samples, float32 of shape (3,)))"
    )


@pytest.mark.parametrize(("samples", "size"), [(259, 32), (9000, 128), (44929, 128), (5, 8), (7, 1), (64, 32)])
@pytest.mark.parametrize("even", [False, True])
def test_feed_gives_every_sample_once_per_epoch(samples: int, size: int, even: bool) -> None:
    x, y = torch.arange(samples)[:, None].float(), torch.zeros(samples).long()
    data = se.Data.from_arrays(x, y, validation=0.0, standardize=False)
    feed = feed_for(data.train, data, size, torch.device("cpu"), even=even)
    seen, sizes = [], []
    for batch_size in feed.epoch(0):
        inputs, _ = feed.batch(batch_size)
        feed.step.add_(1)
        seen += inputs.flatten().tolist()
        sizes.append(batch_size)
    assert sorted(seen) == list(range(samples))
    assert len(sizes) == -(-samples // size)
    assert max(sizes) <= size
    assert set(feed.sizes) == set(sizes)
    assert not even or max(sizes) - min(sizes) <= 1
    single = not even and samples % size == 1 and size > 2
    assert even or sizes[:-1] == [min(size, samples)] * (len(sizes) - 1 - single) + [size - 1] * single
    assert size == 1 or min(sizes) > 1
