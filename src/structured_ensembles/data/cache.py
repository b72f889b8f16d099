"""A data set as one safetensors file, which is mapped into memory rather than read."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from structured_ensembles.data.info import Contents, DataInfo
from structured_ensembles.files import write_tensors

TENSORS = {
    "train.images": "train_images",
    "train.labels": "train_labels",
    "test.images": "test_images",
    "test.labels": "test_labels",
}  # name in the file: field of Contents


def cache_path(root: Path, name: str) -> Path:
    return root / f"{name}.safetensors"


def write_cache(path: Path, info: DataInfo, contents: Contents) -> None:
    """The file appears under its name when it is complete, or not at all."""
    tensors = {name: getattr(contents, field) for name, field in TENSORS.items()}
    metadata = {"name": info.name, "classes": json.dumps(contents.classes), "source": info.source}
    write_tensors(path, tensors, metadata)


def read_cache(path: Path, info: DataInfo) -> Contents:
    """The tensors stay mapped to the file: they cost memory only where they are used."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {field: file.get_tensor(name) for name, field in TENSORS.items()}
        if metadata.get("name") != info.name:
            raise ValueError(f"its metadata name {metadata.get('name')!r} is not {info.name!r}")
        contents = Contents(**tensors, classes=_class_names(metadata.get("classes", "")))
        info.check(contents)
    except (SafetensorError, ValueError) as error:
        raise ValueError(_damaged(path, error)) from error
    return contents


def cached_source(path: str | Path) -> str:
    """Where the data in a cached file comes from, in words: archives and checksums if `load_data` made it."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("source", "unknown")
    except SafetensorError as error:
        raise ValueError(_damaged(path, error)) from error


def _class_names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its metadata classes is no list of names")
    return tuple(names)


def _damaged(path: str | Path, error: Exception) -> str:
    return f"{path} is damaged or not a cached data set ({error}): delete it, and it will be made again"
