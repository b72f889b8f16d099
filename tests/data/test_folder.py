"""Data.from_folder: samples, splits and normalisation are those of arrays, in memory or decoded when they are used."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import structured_ensembles as se
from structured_ensembles.data.picture_files import PictureSplit
from structured_ensembles.data.splits import TensorSplit, fingerprint_split
from tests.support.picture_folder import SHAPES, write_shapes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("shapes"))


def arrays_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a folder by another route: images (samples, 3, 24, 24) and labels, sorted by name."""
    files = sorted(folder.glob("*/*.png"))
    images = [np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files]
    return np.stack(images), np.array([SHAPES.index(file.parent.name) for file in files])


def all_samples(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*split.batches(7), strict=True)
    return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_a_folder_is_the_data_of_its_arrays(shapes: Path, cache_bytes: int) -> None:
    data = se.Data.from_folder(shapes, seed=3, workers=2, cache_bytes=cache_bytes)
    expected = se.Data.from_arrays(*arrays_of(shapes), seed=3, classes=SHAPES)
    assert isinstance(data.train, TensorSplit if cache_bytes else PictureSplit)
    assert data.classes == SHAPES
    assert data.test is None
    assert data.normalization == expected.normalization
    assert data.shape == (3, 24, 24)
    assert data.pixels
    assert data.target_shape == ()
    assert torch.equal(data.example(5), expected.example(5))
    for name in ("train", "validation"):
        for seed in (None, (1, 2)):
            batches, others = (one.batches(name, 8, seed=seed) for one in (data, expected))
            for (inputs, targets), (other_inputs, other_targets) in zip(batches, others, strict=True):
                assert torch.equal(inputs, other_inputs)
                assert torch.equal(targets, other_targets)


def test_the_name_is_that_of_the_folder(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shapes)
    assert se.Data.from_folder(".").name == shapes.name
    monkeypatch.setenv("HOME", str(shapes.parent))
    data = se.Data.from_folder(f"~/{shapes.name}", test=f"~/{shapes.name}", name="mine", cache_bytes=0)
    assert data.name == "mine"
    assert f"Data(mine, 3 classes, train: PictureSplit({len(data.train)} pictures, uint8 of shape (3, 24, 24)" in str(
        data
    )


def test_what_fits_in_the_cache_is_kept(shapes: Path, caplog: pytest.LogCaptureFixture) -> None:
    needed = 36 * 3 * 24 * 24
    with caplog.at_level(logging.INFO, "structured_ensembles"):
        assert isinstance(se.Data.from_folder(shapes, cache_bytes=needed).train, TensorSplit)
        assert isinstance(se.Data.from_folder(shapes, cache_bytes=needed - 1, workers=3).train, PictureSplit)
    assert caplog.messages == [
        f"36 of 36 pictures below {shapes} are kept in memory",
        f"35 of 36 pictures below {shapes} are kept in memory, the other 1 are decoded by 3 threads when they are used",
    ]


def test_kept_pictures_are_decoded_once(shapes: Path, tmp_path: Path) -> None:
    """Also where the others are streamed: 20 of the 36 need no file any more, nor does the copy in memory."""
    folder = tmp_path / "copy"
    shutil.copytree(shapes, folder)
    data = se.Data.from_folder(folder, validation=0, cache_bytes=20 * 3 * 24 * 24 + 5)
    assert isinstance(data.train, PictureSplit)
    expected, labels = arrays_of(shapes)
    for name in sorted(path.relative_to(folder) for path in folder.glob("*/*"))[:20]:
        (folder / name).unlink()
    images, targets = all_samples(data.train)
    assert np.array_equal(images, expected)
    assert targets.tolist() == labels.tolist()
    (folder / "square" / "011.png").unlink()
    with pytest.raises(OSError, match=r"square/011\.png cannot be read any more"):
        all_samples(data.train)


def test_pictures_are_resized_and_grey_if_asked(shapes: Path, tmp_path: Path) -> None:
    shutil.copytree(shapes, tmp_path / "mixed")
    Image.new("RGB", (50, 40), (200, 0, 0)).save(tmp_path / "mixed" / "bar" / "wide.png")
    with pytest.raises(ValueError, match=r"wide\.png has 50×40 pixels and others have 24×24: give the size="):
        se.Data.from_folder(tmp_path / "mixed")
    for cache_bytes in (0, 2**30):
        data = se.Data.from_folder(tmp_path / "mixed", size=16, channels=1, validation=0, cache_bytes=cache_bytes)
        assert data.shape == (1, 16, 16)
        images, labels = all_samples(data.train)
        assert data.validation is None
        assert torch.all(images[12] == round(0.299 * 200))  # the red one, last of its class
        assert labels[12] == 0


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_unreadable_pictures_are_named_and_left_out(
    shapes: Path, tmp_path: Path, cache_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(shapes, folder)
    expected = se.Data.from_folder(folder, cache_bytes=cache_bytes)
    whole = (folder / "disc" / "000.png").read_bytes()
    for number in range(5):
        (folder / "disc" / f"000-{number}.png").write_bytes(whole[: 40 + number])
    caplog.clear()
    data = se.Data.from_folder(folder, cache_bytes=cache_bytes)
    (message,) = caplog.messages
    assert message.startswith(f"5 of 41 pictures below {folder} cannot be read and are left out: ")
    assert [f"000-{number}.png" in message for number in range(5)] == [True, True, True, False, False]
    assert message.endswith(", …")
    for name in ("train", "validation"):
        for mine, other in zip(all_samples(data.split(name)), all_samples(expected.split(name)), strict=True):
            assert torch.equal(mine, other)
    assert data.normalization == expected.normalization
    assert fingerprint_split(data.train) == fingerprint_split(expected.train)


def test_a_pipe_is_left_out_and_not_waited_for(shapes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(shapes, folder)
    os.mkfifo(folder / "disc" / "pipe.png")
    assert len(se.Data.from_folder(folder, size=8, validation=0.0).train) == 36
    assert "1 of 37 pictures" in caplog.text
    assert "pipe.png (it is not a regular file)" in caplog.text


def test_nothing_readable_is_an_error(shapes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(shapes, folder)
    shutil.copytree(shapes, tmp_path / "test")
    for file in (*(folder / "disc").iterdir(), *(tmp_path / "test").glob("*/*")):
        file.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"no picture of the test split can be read, such as .*000\.png"):
        se.Data.from_folder(shapes, test=tmp_path / "test")
    with pytest.raises(ValueError, match="no training picture of class 'disc' can be read"):
        se.Data.from_folder(folder)
    with pytest.raises(ValueError, match=r"none of the 36 pictures .* such as bar/000\.png \(it is none of PNG"):
        se.Data.from_folder(tmp_path / "test")
    with pytest.raises(ValueError, match="no picture of the train split can be read"):
        se.Data.from_folder(tmp_path / "test", size=8)


def test_splits_are_folders_or_shares(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "val", "test")):
        write_shapes(tmp_path / name, count=4 + seed, seed=seed)
    data = se.Data.from_folder(tmp_path)
    for name, folder in (("train", "train"), ("validation", "val"), ("test", "test")):
        images, labels = arrays_of(tmp_path / folder)
        found, targets = all_samples(data.split(name))  # type: ignore[arg-type]
        assert np.array_equal(found, images)
        assert targets.tolist() == labels.tolist()
    chosen = se.Data.from_folder(tmp_path, validation=0.5, test=str(tmp_path / "val"))
    assert (len(chosen.train), len(chosen.validation or ()), len(chosen.test or ())) == (6, 6, 15)
    measured = se.Normalization.of(torch.from_numpy(arrays_of(tmp_path / "train")[0]))
    assert chosen.normalization == measured

    plain = [se.Data.from_folder(tmp_path / "test", test=0.5, validation=0.34, seed=seed) for seed in (0, 1)]
    for one in plain:
        assert (len(one.train), len(one.validation or ()), len(one.test or ())) == (6, 3, 9)
        images, _ = all_samples(one.test)
        assert torch.equal(images, all_samples(plain[0].test)[0])  # the same for every seed
        seen = [all_samples(split)[0] for split in (one.train, one.validation, one.test)]
        assert len(torch.cat(seen).flatten(1).unique(dim=0)) == 18
        assert one.normalization == se.Normalization.of(torch.cat(seen[:2]))  # test pictures do not count
    assert not torch.equal(all_samples(plain[0].validation)[0], all_samples(plain[1].validation)[0])


def test_a_share_that_holds_out_no_picture_is_refused(shapes: Path) -> None:
    with pytest.raises(ValueError, match=r"test=0.02 is less than a picture of each class .* give a larger share"):
        se.Data.from_folder(shapes, test=0.02)


def test_fingerprint_follows_the_contents(shapes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(shapes, folder)

    def fingerprint(**arguments: Any) -> str:
        return fingerprint_split(se.Data.from_folder(folder, cache_bytes=0, **arguments).train)

    before = fingerprint()
    assert before == fingerprint_split(se.Data.from_folder(shapes, cache_bytes=0).train)  # wherever it lies
    file = folder / "disc" / "003.png"
    os.utime(file)
    assert fingerprint() == before
    assert fingerprint(size=20) != before
    assert fingerprint(seed=1) != before
    content = file.read_bytes()
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    assert fingerprint() != before
    file.write_bytes(content)
    assert fingerprint() == before
    file.rename(folder / "bar" / "003a.png")  # another label
    assert fingerprint() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1, or None, not 0"),
        ({"channels": 4}, "channels must be one of 1, 3, not 4"),
        ({"workers": 0}, "workers must be a whole number of at least 1, or None"),
        ({"cache_bytes": -1}, "cache_bytes must be a whole number of at least 0"),
        ({"validation": 1.0}, "validation must be a folder, or a share of at least 0 and less than 1, not 1.0"),
        ({"test": -0.1}, "test must be a folder, or a share"),
        ({"test": [1]}, "test must be a folder, or a share"),
        ({"normalization": "half"}, "normalization must be one of"),
        ({"normalization": ((0.5, 0.5), (1, 1))}, "normalization has 2 means"),
    ],
)
def test_wrong_arguments_are_named(shapes: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Data.from_folder(shapes, **arguments)


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_normalization_can_be_chosen(shapes: Path, cache_bytes: int) -> None:
    data = se.Data.from_folder(shapes, normalization="imagenet", cache_bytes=cache_bytes)
    assert data.normalization_settled
    assert data.normalization == se.Data.from_arrays(*arrays_of(shapes), normalization="imagenet").normalization
    assert se.Data.from_folder(shapes, normalization="unit", cache_bytes=cache_bytes).normalization is None
