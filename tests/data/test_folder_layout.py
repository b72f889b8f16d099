"""Folders of classes and splits are found; what is missing or ambiguous gets a sentence."""

from pathlib import Path

import pytest

from structured_ensembles.data.folder_layout import find_splits, list_classes, list_pictures


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_a_folder_of_classes_is_the_training_split(tmp_path: Path) -> None:
    touch(tmp_path, "dog/b.PNG", "dog/a.jpeg", "cat/deep/er/c.webp", "cat/notes.txt", "cat/.hidden.png", ".git/x/y.png")
    touch(tmp_path, "__MACOSX/z.png", "readme.md")
    assert find_splits(tmp_path) == {"train": tmp_path}
    classes = list_classes(tmp_path)
    assert classes == ("cat", "dog")
    listing = list_pictures("path", tmp_path, classes)
    assert listing.names == ("cat/deep/er/c.webp", "dog/a.jpeg", "dog/b.PNG")
    assert listing.labels == (0, 1, 1)


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train", "val", "test"),
        ("train", "valid", "test"),
        ("training", "validation", "testing"),
        ("Train", "VAL", "Test"),
    ],
)
def test_folders_of_splits_are_found(tmp_path: Path, train: str, validation: str, test: str) -> None:
    touch(tmp_path, f"{train}/a/1.png", f"{train}/b/1.png", f"{test}/a/1.png", f"{validation}/b/1.png", "extra/1.png")
    folders = {"train": tmp_path / train, "test": tmp_path / test, "validation": tmp_path / validation}
    assert find_splits(tmp_path) == folders
    assert list_pictures("validation", folders["validation"], ("a", "b")).labels == (1,)


def test_folders_of_splits_are_not_taken_for_classes(tmp_path: Path) -> None:
    """Two classes named test and validation, or train and test, would be learned without a word."""
    touch(tmp_path, "images/a/1.png", "test/a/1.png", "val/a/1.png")
    with pytest.raises(ValueError, match=r"a folder train of classes beside val and test, but .* has none: rename"):
        find_splits(tmp_path)
    with pytest.raises(ValueError, match=r"has only training and testing, which are splits"):
        find_splits(touch(tmp_path / "flat", "training/1.png", "testing/1.png"))
    with pytest.raises(ValueError, match=r"one folder for the train split, not train and training"):
        find_splits(touch(tmp_path / "both", "train/a/1.png", "training/a/1.png"))


def test_train_may_be_a_class(tmp_path: Path) -> None:
    """A folder `train` of pictures is a class, such as beside `car` and `ship`."""
    touch(tmp_path, "car/1.png", "train/1.png", "train/more/2.png")
    assert find_splits(tmp_path) == {"train": tmp_path}
    assert list_classes(tmp_path) == ("car", "train")


def test_missing_and_ambiguous_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        find_splits(tmp_path / "nowhere")
    touch(tmp_path, "file.png")
    with pytest.raises(FileNotFoundError, match=r"file\.png is a file"):
        find_splits(tmp_path / "file.png")
    with pytest.raises(ValueError, match=r"path must have .* at least two, but .* has none"):
        list_classes(tmp_path)
    touch(tmp_path, "cat/1.png")
    with pytest.raises(ValueError, match=r"path must have .* has only 'cat'"):
        list_classes(tmp_path)
    (tmp_path / "dog").mkdir()
    with pytest.raises(ValueError, match=r"dog must hold pictures .* but has none"):
        list_pictures("path", tmp_path, ("cat", "dog"))
    with pytest.raises(ValueError, match=r"test must have the classes of training, but .* has the folder 'dog'"):
        list_pictures("test", tmp_path, ("cat",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="test must have a folder of pictures for each class"):
        list_pictures("test", tmp_path / "empty", ("cat",))
    touch(tmp_path / "split", "train/a/1.png", "val/a/1.png", "valid/a/1.png")
    with pytest.raises(ValueError, match="one folder for the validation split, not val and valid"):
        find_splits(tmp_path / "split")


def test_folders_that_links_lead_to_again_count_once(tmp_path: Path) -> None:
    """Each copy could be in another split, such that a network is tested on pictures it has learned."""
    touch(tmp_path, "cat/1.png", "cat/deep/2.png", "elsewhere/3.png")
    (tmp_path / "cat" / "deep" / "again").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cat" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "cat" / "4.png").symlink_to(tmp_path / "elsewhere" / "3.png")
    listing = list_pictures("path", tmp_path, ("cat", "elsewhere"))
    assert listing.names == ("cat/1.png", "cat/4.png", "cat/a/3.png", "cat/deep/2.png", "elsewhere/3.png")
