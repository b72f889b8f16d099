"""Find the pictures of a folder: a folder for each class, possibly below folders for the splits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from structured_ensembles.data.pictures import SUFFIXES

# Names of the splits' folders, in any case.
NAMES = {"train": ("train", "training"), "validation": ("val", "valid", "validation"), "test": ("test", "testing")}


@dataclass(frozen=True)
class Listing:
    """The pictures of a split that were found: their names below `root`, sorted by class, and the label of each."""

    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)

    def select(self, rows: Sequence[int]) -> Listing:
        """Return some of the pictures, by their positions."""
        return Listing(self.root, tuple(self.names[row] for row in rows), tuple(self.labels[row] for row in rows))


def find_splits(path: Path) -> dict[str, Path]:
    """Return the folder of each split: `path` itself for training, unless it has a folder `train` of classes.

    A folder `train` with pictures right in it is a class of that name. Raises a ValueError if a split has two folders,
    or only other splits than training have one.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"path must be a folder of pictures, but {path} {_what_is_wrong(path)}")
    folders = _folders(path)
    by_split = {split: [name for name in folders if name.lower() in names] for split, names in NAMES.items()}
    of_classes = [name for names in by_split.values() for name in names if _holds_classes(path / name)]
    if not of_classes:
        _check_classes(path, folders, [name for names in by_split.values() for name in names])
        return {"train": path}
    if not set(of_classes) & set(by_split["train"]):
        raise ValueError(
            f"path must have a folder train of classes beside {' and '.join(of_classes)}, but {path} has none: rename "
            "the folder of the training pictures, or let path be that folder and give the others as test= and "
            "validation="
        )
    for split, names in by_split.items():
        if len(names) > 1:
            raise ValueError(f"{path} must have one folder for the {split} split, not {' and '.join(names)}")
    return {split: path / names[0] for split, names in by_split.items() if names}


def list_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the classes, one for each folder, sorted; raise a ValueError for fewer than two."""
    classes = _folders(folder)
    if len(classes) < 2:
        present = f"only {classes[0]!r}" if classes else "none"
        raise ValueError(
            f"path must have a folder of pictures for each class, at least two, but {folder} has {present}"
        )
    return classes


def list_pictures(argument: str, folder: Path, classes: Sequence[str]) -> Listing:
    """Find the pictures of all classes below a folder; raise an error if it has other classes, or empty ones.

    argument: which split it is, for the error messages.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{argument} must be a folder of pictures, but {folder} {_what_is_wrong(folder)}")
    label_of = {name: label for label, name in enumerate(classes)}
    present = _folders(folder)
    if strange := [name for name in present if name not in label_of]:
        raise ValueError(
            f"{argument} must have the classes of training, but {folder} has the folder {strange[0]!r}, which is none"
        )
    names: list[str] = []
    labels: list[int] = []
    for name in present:
        files = sorted(path.relative_to(folder).as_posix() for path in _pictures(folder / name))
        if not files:
            raise ValueError(
                f"{folder / name} must hold pictures ({', '.join(SUFFIXES)}), but has none: fill it, or remove it"
            )
        names += files
        labels += [label_of[name]] * len(files)
    if not names:
        raise ValueError(f"{argument} must have a folder of pictures for each class, but {folder} has none")
    return Listing(folder, tuple(names), tuple(labels))


def _holds_classes(folder: Path) -> bool:
    """Tell whether a folder has folders, and no pictures beside them."""
    return bool(_folders(folder)) and next(_pictures(folder, deep=False), None) is None


def _check_classes(path: Path, folders: Sequence[str], of_splits: Sequence[str]) -> None:
    """Raise a ValueError if the names of all folders are of splits: they cannot be meant as classes."""
    if len(of_splits) > 1 and len(of_splits) == len(folders):
        raise ValueError(
            f"path must have a folder of pictures for each class, but {path} has only {' and '.join(of_splits)}, which "
            "are splits: each of these must have a folder for each class"
        )


def _folders(path: Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, sorted; hidden ones do not count."""
    return tuple(sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not _is_hidden(entry.name)))


def _pictures(folder: Path, deep: bool = True) -> Iterator[Path]:
    """Yield the picture files of a folder and, if `deep`, of all folders in it, not of hidden ones.

    A folder that links lead to again, such as to itself, counts once: its pictures would be in several splits.
    """
    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if deep and not _is_hidden(name))
        yield from (Path(parent, name) for name in files if name.lower().endswith(SUFFIXES) and not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    """Tell whether a file or folder is of the system or a tool, not of the data."""
    return name.startswith((".", "__"))


def _what_is_wrong(path: Path) -> str:
    """Say why a path is no folder."""
    return "is a file" if path.exists() else "does not exist"
