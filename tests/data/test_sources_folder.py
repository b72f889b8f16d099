"""Folders of pictures by name: `folder:PATH?size=64&test=0.2`."""

from pathlib import Path

import pytest

import structured_ensembles as se
from tests.support.picture_folder import SHAPES, write_shapes


def test_a_folder_has_a_name_with_settings(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path / "shapes", count=10)
    plain = se.load_data(f"folder:{folder}")
    assert (plain.classes, plain.shape, plain.name, plain.test) == (SHAPES, (3, 24, 24), "shapes", None)
    data = se.load_data(
        f"folder:{folder}?size=16&channels=1&test=0.2&validation={folder}", normalization="unit", seed=5
    )
    assert data.shape == (1, 16, 16)
    assert data.normalization is None
    assert [len(split) for split in (data.train, data.split("test"), data.split("validation"))] == [24, 6, 30]


@pytest.mark.parametrize(
    "name", ["folder:", "folder:?size=3", "folder:x?sizes=3", "folder:x?size", "folder:x?size=", "folder:x?size=3&"]
)
def test_wrong_names_of_folders_say_what_is_possible(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be named folder:PATH, with any of size, channels, validation, test"):
        se.load_data(name)


def test_sizes_in_names_are_whole_numbers(tmp_path: Path) -> None:
    folder = write_shapes(tmp_path / "shapes", count=1)
    with pytest.raises(ValueError, match=r"size and channels of .* must be whole numbers"):
        se.load_data(f"folder:{folder}?size=large")
    with pytest.raises(ValueError, match="size must be a whole number of at least 1"):
        se.load_data(f"folder:{folder}?size=0")
