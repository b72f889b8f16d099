"""Data as users hold them: what cannot be taken is refused with a way to convert it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.arange(40) % 2
PAIRS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


class Frame:
    """A table with a column of words, as pandas converts it: all numbers become words."""

    columns = ("age", "city")
    dtypes = (np.dtype("float64"), np.dtype("object"))

    def __len__(self) -> int:
        return 40

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array([[1.5, "Rome"]] * 40, dtype=object)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.eye(2, dtype=np.int64)[Y], r"one label each, not \(40, 2\): of one-hot labels give targets\.argmax\(1\)"),
        (np.zeros((40, 8, 8), np.int64), r"one for each pixel or token, are not supported"),
        (Y * 2 - 1, r"from -1 to 1: number the classes from 0 on, as numpy\.unique"),
        (np.array(["dog", "cat"])[Y], r"such as .*dog.*numpy\.unique\(names, return_inverse=True\)\[1\]"),
    ],
)
def test_targets_of_another_form_are_refused_with_their_conversion(targets: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        se.Data.from_arrays(X, targets)


def test_columns_that_are_no_numbers_are_named() -> None:
    with pytest.raises(TypeError, match=r"inputs must be numbers, which these columns are not: 'city'; pandas"):
        se.Data.from_arrays(Frame(), Y)


def test_loader_and_dataset_that_are_mixed_up_are_told_apart() -> None:
    with pytest.raises(TypeError, match=r"not DataLoader: Data\.from_loaders takes a DataLoader"):
        se.Data.from_datasets(DataLoader(PAIRS, 8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a DataLoader, not a dataset: Data\.from_datasets takes Tensor"):
        se.Data.from_loaders(PAIRS, classes=2)  # type: ignore[arg-type]


def test_dicts_without_labels_are_told_the_name() -> None:
    samples: Any = [{"x": row, "label": int(label)} for row, label in zip(X, Y, strict=True)]
    with pytest.raises(TypeError, match=r"a dict of 'x', 'label': its targets must be named \"labels\""):
        se.Data.from_loaders(DataLoader(samples, 8), classes=2)


def test_missing_split_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="data has no test split, only train and validation"):
        se.Data.from_arrays(X, Y).split("test")


PIXELS = torch.randint(0, 256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_float_images_from_0_to_255_warn_and_say_what_to_give() -> None:
    message = r"floats from 0 to 255, which a network gets as they are.*uint8 pixels, or values divided by 255, or "
    with pytest.warns(UserWarning, match=message + "normalization='standard'") as caught:
        se.Data.from_arrays(PIXELS.float(), Y)
    assert caught[0].filename == __file__
    loader = DataLoader(TensorDataset(PIXELS.float(), torch.from_numpy(Y)), batch_size=40)
    with pytest.warns(UserWarning, match=message + "a pair normalization="):
        se.Data.from_loaders(loader, classes=2)
    with pytest.warns(UserWarning, match=message):
        se.Data.from_arrays({"image": PIXELS.float()}, Y)


@pytest.mark.parametrize(
    "images", [PIXELS / 255, (PIXELS / 255 - 0.45) / 0.22, PIXELS / 2550, torch.zeros(40, 3, 8, 8)]
)
def test_scaled_images_do_not_warn(images: torch.Tensor, recwarn: pytest.WarningsRecorder) -> None:
    se.Data.from_arrays(images, Y)
    se.Data.from_arrays(PIXELS.float(), Y, normalization="none")
    se.Data.from_arrays(PIXELS.float(), Y, normalization="standard")
    assert not recwarn.list


ONE_HOT = np.eye(2)[Y]  # floats


def test_one_hot_floats_are_refused_unless_there_is_a_task() -> None:
    message = r"targets \(40, 2\) seem to be one-hot labels.*targets\.argmax\(1\).*task='regression'"
    with pytest.raises(ValueError, match=message):
        se.Data.from_arrays(X, ONE_HOT)
    with pytest.raises(ValueError, match=message):
        se.Data.from_datasets(TensorDataset(torch.from_numpy(X), torch.from_numpy(ONE_HOT)))
    assert se.Data.from_arrays(X, ONE_HOT, task="regression").target_shape == (2,)
    several_ones = np.random.default_rng(0).integers(0, 2, (40, 3)).astype(np.float32)
    assert se.Data.from_arrays(X, several_ones).target_shape == (3,)


def test_one_hot_floats_of_a_loader_warn() -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(ONE_HOT)), batch_size=40)
    with pytest.warns(UserWarning, match=r"\(40, 2\) seem to be one-hot labels.*targets\.argmax\(1\)"):
        assert se.Data.from_loaders(loader).task == "regression"
    with pytest.raises(ValueError, match=r"floats, which make it a regression, but there are classes"):
        se.Data.from_loaders(loader, classes=2)


def test_floats_beside_classes_are_refused_and_floats_of_0_and_1_warn() -> None:
    floats = Y.astype(np.float32)
    with pytest.raises(ValueError, match=r"floats, which make it a regression, but there are classes"):
        se.Data.from_arrays(X, floats, classes=["cat", "dog"])
    assert se.Data.from_arrays(X, floats, classes=["cat", "dog"], task="classification").num_classes == 2
    with pytest.warns(UserWarning, match="only 0 and 1 occur: if they are labels, say task='classification'"):
        assert se.Data.from_arrays(X, floats).task == "regression"
