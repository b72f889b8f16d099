"""The cache of a data set: one safetensors file, which is mapped into memory rather than read.

Files that we write have one more entry in their metadata, `sha256`, over the names of the classes, the source and all
tensors. It is checked once per process: at 1 to 2 GB per second, as fast as a disk. Files that others made may lack it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from structured_ensembles.data.info import Contents, DataInfo
from structured_ensembles.storage.files import check_regular, write_tensors
from structured_ensembles.storage.tensor_file import checksum

TENSORS = {
    "train.images": "train_images",
    "train.labels": "train_labels",
    "test.images": "test_images",
    "test.labels": "test_labels",
}  # name in the file: field of Contents
CHECKSUM = "sha256"
_INTACT: set[tuple[object, ...]] = set()  # files with a verified checksum: path, inode, size, time of change


def cache_path(root: Path, name: str) -> Path:
    """Return the path of a data set's cached file."""
    return root / f"{name}.safetensors"


def write_cache(path: Path, info: DataInfo, contents: Contents) -> None:
    """Write a data set to its cached file, which appears under its name when it is complete."""
    tensors = {name: getattr(contents, field) for name, field in TENSORS.items()}
    metadata = {"name": info.name, "classes": json.dumps(contents.classes), "source": info.source}
    write_tensors(path, tensors, {**metadata, CHECKSUM: _checksum(metadata, tensors)})


def read_cache(path: Path, info: DataInfo) -> Contents:
    """Read and check a cached data set; its tensors stay mapped to the file, and take memory only when used."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        if metadata.get("name") != info.name:
            raise ValueError(f"its metadata name {metadata.get('name')!r} is not {info.name!r}")
        contents = Contents(
            **{field: tensors[name] for name, field in TENSORS.items()},
            classes=_class_names(metadata.get("classes", "")),
        )
        info.check(contents)
        if CHECKSUM in metadata:
            if names != TENSORS.keys():
                raise ValueError(f"it must have {', '.join(TENSORS)}, not {', '.join(sorted(names))}")
            _check_intact(path, metadata, tensors)
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged or not a cached data set ({error}): delete it, and it will be made again"
        ) from error
    return contents


def _check_intact(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a file does not match its checksum; each file is checked once per process."""
    status = os.stat(path)
    file = (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
    if file in _INTACT:
        return
    if metadata[CHECKSUM] != _checksum(metadata, tensors):
        raise ValueError("its contents do not match its checksum")
    _INTACT.add(file)


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Compute the checksum over metadata and tensors."""
    return checksum(json.dumps({name: value for name, value in sorted(metadata.items()) if name != CHECKSUM}), tensors)


def _class_names(text: str) -> tuple[str, ...]:
    """Parse the names of the classes; raise a ValueError unless they are a list of strings."""
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its metadata classes must be a list of names")
    return tuple(names)
