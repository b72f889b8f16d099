"""Tiny ImageNet: a zip archive of JPEG files. Its test images lack labels: its validation images are our test split."""

import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from structured_ensembles.common.progress import progress
from structured_ensembles.data.archives import read_zip
from structured_ensembles.data.info import Archive, Contents, DataInfo

FOLDER = "tiny-imagenet-200"
SIDE = 64
LARGEST_IMAGE = 2**20  # bytes
DECODE_CHUNK = 500  # images that a thread decodes at once


def _read_tiny_imagenet(paths: Sequence[Path]) -> Contents:
    """Read the archive: training images, and validation images as the test split."""
    with ZipFile(paths[0]) as archive:
        identifiers = read_zip(archive, f"{FOLDER}/wnids.txt").decode().split()
        label_of = {identifier: label for label, identifier in enumerate(identifiers)}
        train = [(name, identifier) for name in sorted(archive.namelist()) if (identifier := _class_of(name))]
        rows = read_zip(archive, f"{FOLDER}/val/val_annotations.txt").decode().splitlines()
        test = [(f"{FOLDER}/val/images/{file}", identifier) for file, identifier, *_ in map(str.split, rows)]
        unknown = {identifier for _, identifier in train + test} - set(label_of)
        if unknown:
            raise ValueError(f"wnids.txt does not list the class {min(unknown)}")
        images = decode_images(lambda name: read_zip(archive, name, LARGEST_IMAGE), [name for name, _ in train + test])
        words = read_zip(archive, f"{FOLDER}/words.txt") if f"{FOLDER}/words.txt" in archive.namelist() else b""
    labels = torch.tensor([label_of[identifier] for _, identifier in train + test])
    count = len(train)
    return Contents(
        images[:count], labels[:count], images[count:], labels[count:], _readable_names(identifiers, words.decode())
    )


def _class_of(name: str) -> str | None:
    """Return the WordNet identifier in the name of a training image; None for any other file."""
    match name.split("/"):
        case [folder, "train", identifier, "images", file] if folder == FOLDER and file.endswith(".JPEG"):
            return identifier
    return None


def decode_images(read: Callable[[str], bytes], names: Sequence[str]) -> Tensor:
    """Decode the JPEG files that `read` returns by name to (samples, 3, 64, 64), in the order of `names`.

    Pillow releases Python's lock while it decodes, so threads help.
    """
    images = np.empty((len(names), 3, SIDE, SIDE), np.uint8)

    def decode(start: int) -> None:
        for position in range(start, min(start + DECODE_CHUNK, len(names))):
            images[position] = _pixels(read(names[position]), names[position])

    starts = range(0, len(names), DECODE_CHUNK)
    with ThreadPoolExecutor(os.cpu_count()) as pool, progress("decoding Tiny ImageNet", len(starts)) as advance:
        for _ in pool.map(decode, starts):
            advance()
    return torch.from_numpy(images)


def read_identifiers(path: Path) -> list[str]:
    """Read the WordNet identifiers of the classes, in the order of their labels, from the official archive."""
    with ZipFile(path) as archive:
        return read_zip(archive, f"{FOLDER}/wnids.txt").decode().split()


def _pixels(content: bytes, name: str) -> np.ndarray:
    """Decode one image to shape (3, 64, 64); grey ones become RGB."""
    with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
        if image.size != (SIDE, SIDE):
            raise ValueError(f"{name} has {image.width}×{image.height} pixels, not {SIDE}×{SIDE}")
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def _readable_names(identifiers: Sequence[str], words: str) -> tuple[str, ...]:
    """Name each class by its first word, `goldfish` for `n01443537`; by all words if two classes share the first."""
    entries = dict(line.split("\t", 1) for line in words.splitlines() if "\t" in line)
    names = [entries.get(identifier, identifier).strip() for identifier in identifiers]
    first = [name.split(",")[0] for name in names]
    occurrences = Counter(first)
    return tuple(short if occurrences[short] == 1 else name for short, name in zip(first, names, strict=True))


TINY_IMAGENET = DataInfo(
    name="tiny-imagenet",
    title="Tiny ImageNet: photographs in 200 classes of ImageNet",
    shape=(3, SIDE, SIDE),
    num_classes=200,
    train=100_000,
    test=10_000,
    archives=(
        Archive(
            "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            sha256="6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        ),
    ),
    read=_read_tiny_imagenet,
)
