"""Arrays of every kind at every entry point: the right result, or an error that says what is wrong."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles.continual import NaiveLearner
from structured_ensembles.data.conversion import as_tensor
from tests.support.continual_cases import make_backbone, make_tasks

rng = np.random.default_rng(0)
COLUMNS = rng.normal(size=(40, 4)).astype(np.float32)
LABELS = np.arange(40) % 2
PIXELS = rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8)
PIXELS[:, :, 0, 0] = 255


class Listed:
    """Hold a list as a dataset."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Nullable:
    """Convert to an array of objects, as pandas columns with missing values do."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values, dtype=object)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values


def read_only(values: Any) -> Any:
    array = np.array(values)
    array.flags.writeable = False
    return array


def ensemble_of(data: se.Data, inputs: int) -> se.Ensemble:
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(inputs, 2))])
    ensemble.adopt(data)
    return ensemble.eval()


SAME: dict[str, Callable[[Any], Any]] = {
    "float64": lambda x: x.astype(np.float64),
    "long double": lambda x: x.astype(np.longdouble),
    "big-endian": lambda x: x.astype(">f4"),
    "read-only": read_only,
    "not contiguous": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "Fortran": np.asfortranarray,
    "objects": lambda x: x.astype(object),
    "nullable": Nullable,
    "lists": lambda x: x.tolist(),
    "tensor with gradients": lambda x: torch.tensor(x, requires_grad=True),
    "masked nowhere": np.ma.masked_array,
    "array of rows": lambda x: [*x],
}
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "masked": (lambda x: np.ma.masked_array(x, x > 1), r"has \d+ masked values.*filled"),
    "rows masked": (lambda x: [np.ma.masked_array(row, row > 1) for row in x], r"has \d+ masked values"),
    "float64 beyond float32": (lambda x: x.astype(np.float64) * 1e200, "float32 cannot hold, beyond 3.4e38"),
    "float16 overflow": (lambda x: torch.tensor(x * 1e6).half(), "not finite"),
    "NaN": (
        lambda x: np.where(x > 1, np.nan, x),
        r"not finite: \d+ of \d+ are NaN or infinite, the first at \[\d+, \d\]",
    ),
    "complex": (lambda x: x + 1j, "real numbers"),
    "strings": (lambda x: x.astype(str), r"must be numbers.*<U\d+ such as"),
    "missing": (lambda x: Nullable(np.where(x > 1, None, x)), "without missing values, not object such as"),
    "numbers and strings": (lambda x: [*x.tolist()[1:], ["a"] * 4], "must be numbers"),
    "ragged": (lambda x: [[1.0, 2.0], [3.0]], "of one shape"),
    "sparse": (scipy.sparse.csr_matrix, "dense array, not a csr_matrix: call its toarray"),
    "sparse tensor": (lambda x: torch.tensor(x).to_sparse(), "dense tensor, not a sparse tensor"),
    "meta": (lambda x: torch.tensor(x).to("meta"), "dense tensor, not a meta tensor"),
    "empty": (lambda x: x[:0], "sample"),
    "dates": (lambda x: x.astype("datetime64[s]"), "must be numbers"),
}


@pytest.mark.parametrize("array_type", SAME)
def test_equal_values_in_any_array_type_give_equal_data(array_type: str) -> None:
    data = se.Data.from_arrays(COLUMNS, LABELS, standardize=False)
    array = SAME[array_type](COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = se.Data.from_arrays(array, LABELS, standardize=False)
        assert torch.equal(same.train.inputs, data.train.inputs)
        ensemble = ensemble_of(data, 4)
        assert torch.equal(ensemble.predict_proba(array), ensemble.predict_proba(COLUMNS))
        if not isinstance(array, Nullable):  # it has no rows
            stacked = se.Data.from_datasets(Listed(array, LABELS), standardize=False)
            assert torch.equal(stacked.train.inputs, data.train.inputs)


@pytest.mark.parametrize("array_type", WRONG)
def test_non_numeric_arrays_are_refused_by_every_entry_point(array_type: str) -> None:
    make, sentence = WRONG[array_type]
    array = make(COLUMNS)
    ensemble = ensemble_of(se.Data.from_arrays(COLUMNS, LABELS), 4)
    doors: list[Callable[[], Any]] = [
        lambda: se.Data.from_arrays(array, LABELS),
        lambda: se.Data.from_arrays(COLUMNS, LABELS, test=(array, LABELS)),
        lambda: ensemble.predict(array),
        lambda: ensemble.uncertainty(array),
    ]
    for door in doors:
        with pytest.raises((TypeError, ValueError), match=sentence):
            door()


def test_arrays_from_datasets_and_loaders_are_checked() -> None:
    ensemble = ensemble_of(se.Data.from_arrays(COLUMNS, LABELS), 4)
    masked = np.ma.masked_array(COLUMNS, COLUMNS > 1)
    with pytest.raises(TypeError, match=r"train\[\d+\].*masked values"):
        se.Data.from_datasets(Listed(masked, LABELS))
    with pytest.raises(TypeError, match=r"train\[3\].*masked values"):
        se.Data.from_datasets(Listed(COLUMNS, np.ma.masked_array(LABELS, np.arange(40) == 3)))
    broken = torch.tensor(COLUMNS)
    broken[30, 2] = torch.nan
    for wrong, sentence in (
        (broken.flip(0)[:20], "inputs of train contain values that are not finite"),
        (torch.tensor(COLUMNS).cfloat(), "inputs of train must be real numbers"),
        (torch.tensor(COLUMNS).double() * 1e200, "inputs of train contain values that float32 cannot hold"),
    ):
        first = DataLoader(TensorDataset(wrong, torch.tensor(LABELS)[: len(wrong)]), batch_size=20)
        with pytest.raises((TypeError, ValueError), match=sentence):
            se.Data.from_loaders(first, classes=2)
    values = torch.tensor(COLUMNS[:, 0])
    with pytest.raises(ValueError, match="targets of test contain values that are not finite"):
        se.Data.from_loaders(
            DataLoader(TensorDataset(values[:, None], values)),
            test=DataLoader(TensorDataset(values[:, None], values / 0)),
        )
    dataset = TensorDataset(broken, torch.tensor(LABELS))
    streamed = se.Data.from_loaders(DataLoader(dataset, batch_size=8), classes=2)
    for x in (dataset, DataLoader(dataset, batch_size=8), streamed.train):
        with pytest.raises(ValueError, match="not finite"):
            ensemble.predict(x)


def test_targets_are_checked_like_inputs() -> None:
    for targets, sentence in (
        (np.ma.masked_array(LABELS, np.arange(40) == 3), "has 1 masked values"),
        (np.full(40, 1e200), "beyond 3.4e38"),
        (np.full(40, np.nan), "not finite"),
        (np.array(["cat", "dog"] * 20), "must be numbers.*'cat'"),
        (LABELS - 1, "reach from -1 to 0"),
        (LABELS + 1j, "real numbers"),
        (scipy.sparse.csr_matrix(LABELS), "toarray"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            se.Data.from_arrays(COLUMNS, targets)
    for targets in (np.full(40, 1e30), np.full(40, 0.5), np.full(40, np.inf)):
        with pytest.raises(ValueError, match=r"whole numbers for a classification|not finite"):
            se.Data.from_arrays(COLUMNS, targets, task="classification")
    for same in (LABELS.astype(">i4"), LABELS.astype(object), LABELS.astype(bool), LABELS.astype(np.uint16)):
        assert se.Data.from_arrays(COLUMNS, same).train.targets.tolist() == LABELS.tolist()


def test_huge_label_is_refused_as_a_number_of_classes() -> None:
    labels = LABELS.copy()
    labels[7] = 20_000_000
    sentence = r"targets reach to 20,000,000, which would be 20,000,001 classes for 40 samples: number the classes"
    for task in (None, "classification"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=sentence):
                se.Data.from_arrays(COLUMNS, labels, task=task)
    with pytest.raises(ValueError, match="labels from 0 to 2, but reach from 0 to 20000000"):
        se.Data.from_arrays(COLUMNS, labels, classes=3)
    assert se.Data.from_arrays(COLUMNS, labels, task="regression").num_classes == 0
    labels[7] = 50_000
    with pytest.warns(UserWarning, match="taken for 50,001 classes"):
        assert se.Data.from_arrays(COLUMNS, labels).num_classes == 50_001


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.int64, np.uint32])
def test_integer_images_other_than_uint8_need_a_normalization(dtype: Any) -> None:
    images = PIXELS.astype(dtype) * (100 if dtype == np.uint16 else 1)
    name = np.dtype(dtype).name
    loader = DataLoader(TensorDataset(torch.from_numpy(images), torch.tensor(LABELS)), batch_size=20)
    doors: list[Callable[[], Any]] = [
        lambda: se.Data.from_arrays(images, LABELS),
        lambda: se.Data.from_datasets(Listed(images, LABELS)),
        lambda: se.Data.from_loaders(loader, classes=2),
    ]
    for door in doors:
        with pytest.raises(ValueError, match=f"images of {name}, from 0 to {images.max()}.*normalization='standard'"):
            door()
    data = se.Data.from_arrays(images, LABELS, normalization="standard")
    inputs, _ = next(data.batches("train", 36))
    assert abs(float(inputs.mean())) < 0.2
    assert 0.8 < float(inputs.std()) < 1.2
    assert se.Data.from_arrays(images, LABELS, normalization="none").normalization is None


def test_binary_images_may_have_any_dtype() -> None:
    expected = se.Data.from_arrays((PIXELS > 127).astype(np.float32), LABELS)
    for dtype in (bool, int, np.uint16):
        data = se.Data.from_arrays((PIXELS > 127).astype(dtype), LABELS)
        assert torch.equal(data.train.inputs, expected.train.inputs)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16])
def test_ensemble_trained_on_uint8_refuses_other_integers(dtype: torch.dtype) -> None:
    ensemble = ensemble_of(se.Data.from_arrays(PIXELS, LABELS), 36)
    expected = ensemble.predict_proba(PIXELS)
    torch.testing.assert_close(ensemble.predict_proba(PIXELS / 255), expected)
    dark = torch.from_numpy(PIXELS.clip(0, 1)).to(dtype)
    wide_pixels = torch.from_numpy(PIXELS).to(dtype)
    name = str(dtype).removeprefix("torch.")
    for x in (
        wide_pixels,
        dark,
        DataLoader(wide_pixels, batch_size=8),
        TensorDataset(wide_pixels, torch.tensor(LABELS)),
    ):
        with pytest.raises(ValueError, match=rf"as floats in \[0,1\], not {name}"):
            ensemble.predict(x)
    with pytest.raises(ValueError, match=f"not {name}"):
        ensemble(wide_pixels)
    with pytest.raises(ValueError, match=f"not {name}"):
        ensemble.calibrate((wide_pixels, LABELS))


def test_learner_trained_on_uint8_refuses_other_integers(tmp_path: Any) -> None:
    learner, task = NaiveLearner(make_backbone(), epochs=1, quiet=True, device="cpu"), make_tasks(1)[0]
    learner.learn(task)
    learner.save(tmp_path / "learner.safetensors")
    split = task.data.split("test")
    pixels: Tensor = split.inputs[split.index]
    for same in (learner, NaiveLearner.load(tmp_path / "learner.safetensors", make_backbone(), device="cpu")):
        torch.testing.assert_close(same.logits(pixels.float() / 255, task=0), same.logits(pixels, task=0))
        for wrong in (pixels.long(), pixels.float()):
            with pytest.raises(ValueError, match=r"must be pixels as uint8"):
                same.predict(wrong, task=0)
            with pytest.raises(ValueError, match=r"must be pixels as uint8"):
                same.infer_task(wrong)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36 + 4, 2)

    def forward(self, picture: Tensor, columns: Tensor) -> Tensor:
        return self.layer(torch.cat((picture.flatten(1), columns), 1))


def test_pixels_among_several_inputs_are_checked() -> None:
    torch.manual_seed(0)
    ensemble = se.Ensemble([Both()])
    ages = rng.integers(20, 90, (40, 4))
    ensemble.adopt(se.Data.from_arrays({"picture": PIXELS, "columns": ages.astype(np.float32)}, LABELS))
    expected = ensemble.predict_proba({"picture": PIXELS, "columns": ages.astype(np.float64)})
    for wrong in (PIXELS.astype(int), PIXELS.astype(np.float32)):
        with pytest.raises(ValueError, match=r"x\['picture'\] must be pixels as uint8"):
            ensemble.predict({"picture": wrong, "columns": ages.astype(np.float32)})
    bytes_too = ensemble.predict_proba({"picture": PIXELS, "columns": ages.astype(np.uint8)})
    torch.testing.assert_close(bytes_too, expected)


def test_uint8_is_not_rescaled_for_an_ensemble_trained_on_columns() -> None:
    """Ages divided by 255 would be other ages."""
    ages = rng.integers(20, 90, (40, 4))
    ensemble = ensemble_of(se.Data.from_arrays(ages.astype(np.float32), LABELS), 4)
    for dtype in (np.uint8, np.int64, np.float64):
        torch.testing.assert_close(
            ensemble.predict_proba(ages.astype(dtype)), ensemble.predict_proba(ages.astype(np.float32))
        )
    floats = ensemble_of(se.Data.from_arrays((PIXELS / 255).astype(np.float32), LABELS), 36)
    torch.testing.assert_close(floats.predict_proba(PIXELS), floats.predict_proba(PIXELS / 255))


def test_inputs_beyond_float16_range_are_refused() -> None:
    data = se.Data.from_arrays(COLUMNS, LABELS, standardize=False)
    ensemble = ensemble_of(data, 4)
    large = COLUMNS * np.float32(1e6)
    assert bool(ensemble.logits(large).isfinite().all())
    with pytest.raises(ValueError, match="computes in float16, whose largest number is 65504"):
        ensemble.half().predict(large)


def test_read_only_arrays_are_not_copied(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", COLUMNS)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert as_tensor("x", mapped).data_ptr() == mapped.ctypes.data
