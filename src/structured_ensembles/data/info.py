"""Descriptions of published data sets (archives, sizes, reader), and their contents once read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Archive:
    """A file that the authors of a data set publish.

    md5: the checksum that they publish. sha256: the widely confirmed one of that file, where we know it; it also
        detects a forged file of the same md5, which plain http would let through.
    """

    url: str
    md5: str
    folder: str = ""  # below the downloads, for archives whose file names are not unique
    sha256: str = ""

    @property
    def checksums(self) -> dict[str, str]:
        """Return the known checksums, by algorithm, the strongest first."""
        return {name: value for name, value in (("sha256", self.sha256), ("md5", self.md5)) if value}

    @property
    def file(self) -> str:
        """Return its path below the folder of downloads."""
        name = self.url.rsplit("/", 1)[-1]
        return f"{self.folder}/{name}" if self.folder else name


@dataclass(frozen=True)
class Contents:
    """All images, uint8 (samples, channels, height, width), and their labels, int64 (samples,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]  # their names


@dataclass(frozen=True)
class DataInfo:
    """The description of a data set: name, sizes, archives and reader."""

    name: str
    title: str
    shape: tuple[int, int, int]  # of an image: channels, height, width
    num_classes: int
    train: int  # samples
    test: int
    archives: tuple[Archive, ...] = ()  # none: it comes with an installed package
    read: Callable[[Sequence[Path]], Contents] | None = None  # from the archives' files, in their order

    @property
    def source(self) -> str:
        """Return the archives and their checksums, in one line."""
        archives = [
            f"{archive.file} {' '.join(f'{name} {value}' for name, value in reversed(archive.checksums.items()))}"
            for archive in self.archives
        ]
        return "; ".join(archives)

    def check(self, contents: Contents) -> None:
        """Raise a ValueError that says how the contents differ from this description."""
        for split, images, labels, count in (
            ("train", contents.train_images, contents.train_labels, self.train),
            ("test", contents.test_images, contents.test_labels, self.test),
        ):
            _check_tensor(f"{split}.images", images, torch.uint8, (count, *self.shape))
            _check_tensor(f"{split}.labels", labels, torch.int64, (count,))
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.num_classes:
                raise ValueError(f"{split}.labels reach from {low} to {high}, not from 0 to {self.num_classes - 1}")
        if len(contents.classes) != self.num_classes:
            raise ValueError(f"it names {len(contents.classes)} classes, not {self.num_classes}")


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless a tensor has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape {shape}")
