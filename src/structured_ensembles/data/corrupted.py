"""load_corrupted(): the official corrupted test images (CIFAR-10-C, CIFAR-100-C, Tiny-ImageNet-C), read lazily.

They come from a folder where a person unpacked them, or from the official archive, whose checksum is checked. It is not
compressed, so images are read in place: nothing is unpacked, and only the requested ones of several gigabytes are read.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.data.download import fetch_archives
from structured_ensembles.data.file_sources import ByteRange, files_in_folder, files_in_tar
from structured_ensembles.data.info import Archive
from structured_ensembles.data.sources import data_folder
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.data.tiny_imagenet import LARGEST_IMAGE, TINY_IMAGENET, decode_images, read_identifiers

SEVERITIES = (1, 2, 3, 4, 5)
Files = Mapping[str, ByteRange]


@dataclass(frozen=True)
class CorruptedInfo:
    """The description of a set of corrupted images, before it is read."""

    name: str
    shape: tuple[int, int, int]  # of an image: channels, height, width
    num_classes: int
    samples: int  # of each corruption and severity
    archive: Archive
    corruptions: Callable[[Files], list[str]]  # names the corruptions that the files have
    read: Callable[[CorruptedData, str, int], tuple[Tensor, Tensor]]
    clean: Archive | None = None  # tells the order of the classes, if the images do not

    @property
    def folder(self) -> str:
        """Return the name of the folder in the archive, which is also that of the unpacked one."""
        return Path(self.archive.file).stem


@dataclass(frozen=True)
class CorruptedData:
    """Official corrupted images; `split` reads those of one corruption and severity."""

    info: CorruptedInfo
    names: tuple[str, ...]  # of the available corruptions
    files: Files
    identifiers: tuple[str, ...] = ()  # of the classes, in the order of their labels, where files are named after them

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image."""
        return self.info.shape

    def split(self, name: str, severity: int) -> TensorSplit:
        """Read the images, uint8 (samples, channels, height, width), and labels (samples,); severity is from 1 to 5."""
        if name not in self.names:
            raise ValueError(f"name must be one of {', '.join(self.names)}, not {name!r}")
        if severity not in SEVERITIES:
            raise ValueError(f"severity must be one of {', '.join(map(str, SEVERITIES))}, not {severity!r}")
        try:
            images, labels = self.info.read(self, name, severity)
            self._check(images, labels)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.info.name}: {name} at severity {severity} cannot be read: {error}") from error
        return TensorSplit(images, labels, torch.arange(len(images)))

    def _check(self, images: Tensor, labels: Tensor) -> None:
        """Raise a ValueError unless images and labels are as described."""
        expected = (self.info.samples, *self.info.shape)
        if images.dtype != torch.uint8 or tuple(images.shape) != expected:
            raise ValueError(f"images are {images.dtype} of shape {tuple(images.shape)}, not uint8 of {expected}")
        low, high = int(labels.min()), int(labels.max())
        if len(labels) != len(images) or low < 0 or high >= self.info.num_classes:
            raise ValueError(
                f"{len(labels)} labels reach from {low} to {high}, not from 0 to {self.info.num_classes - 1}"
            )


def load_corrupted(name: str, root: str | Path | None = None) -> CorruptedData:
    """Open the official corrupted images of a data set: "cifar10-c", "cifar100-c" or "tiny-imagenet-c".

    root: the folder of the data sets, as for `load_data`. In it, an unpacked folder such as CIFAR-10-C is used as it
        is; else downloads/CIFAR-10-C.tar, which is downloaded (3 GB) if it is not there.
    """
    if name not in CORRUPTED_SETS:
        raise ValueError(f"name must be one of {', '.join(map(repr, CORRUPTED_SETS))}, not {name!r}")
    info, folder = CORRUPTED_SETS[name], data_folder(root)
    source = folder / info.folder
    if source.is_dir():
        files = files_in_folder(source)
    else:
        (source,) = fetch_archives([info.archive], folder / "downloads")
        try:
            files = files_in_tar(source, info.folder)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ValueError(f"{source} cannot be read as {name}: {error}") from error
    names = info.corruptions(files)
    if not names:
        raise ValueError(f"{source} holds no images of {name}")
    identifiers: list[str] = []
    if info.clean is not None:
        identifiers = read_identifiers(fetch_archives([info.clean], folder / "downloads")[0])
    return CorruptedData(info, tuple(names), files, tuple(identifiers))


def has_corrupted(name: str, root: str | Path | None, corruptions: Iterable[str]) -> bool:
    """Tell whether the data folder holds these official corruptions already, so that nothing is downloaded."""
    if name not in CORRUPTED_SETS:
        return False
    info, folder = CORRUPTED_SETS[name], data_folder(root)
    unpacked, downloads = folder / info.folder, folder / "downloads"
    if info.clean is not None and not (downloads / info.clean.file).exists():
        return False
    if unpacked.is_dir():
        return set(corruptions) <= set(info.corruptions(files_in_folder(unpacked)))
    return (downloads / info.archive.file).exists()


def _array_names(files: Files) -> list[str]:
    """List the corruptions that have a .npy file."""
    return [file.removesuffix(".npy") for file in sorted(files) if file.endswith(".npy") and file != "labels.npy"]


def _read_arrays(data: CorruptedData, name: str, severity: int) -> tuple[Tensor, Tensor]:
    """Read from one array (5 * samples, height, width, channels) per corruption, with the severities in order."""
    if "labels.npy" not in data.files:
        raise ValueError("there is no file labels.npy")
    images, labels = data.files[f"{name}.npy"].array(), data.files["labels.npy"].array()
    count = data.info.samples
    if images.ndim != 4 or len(images) != len(SEVERITIES) * count or labels.shape != (len(images),):
        raise ValueError(f"images have the shape {images.shape} and labels {labels.shape}")
    rows = slice((severity - 1) * count, severity * count)
    pixels = np.array(images[rows].transpose(0, 3, 1, 2), order="C")
    return torch.from_numpy(pixels), torch.from_numpy(labels[rows].astype(np.int64))


def _folder_names(files: Files) -> list[str]:
    """List the corruptions that have a folder of JPEG files."""
    return sorted({file.split("/")[0] for file in files if file.endswith(".JPEG") and file.count("/") == 3})


def _read_folders(data: CorruptedData, name: str, severity: int) -> tuple[Tensor, Tensor]:
    """Read files corruption/severity/class/name.JPEG, in the order of their names."""
    names = sorted(file for file in data.files if file.startswith(f"{name}/{severity}/") and file.endswith(".JPEG"))
    label_of = {identifier: label for label, identifier in enumerate(data.identifiers)}
    classes = [file.split("/")[2] for file in names]
    unknown = set(classes) - set(label_of)
    if unknown:
        raise ValueError(f"the class {min(unknown)} is not one of Tiny ImageNet's")
    images = decode_images(lambda file: data.files[file].read(LARGEST_IMAGE), names)
    return images, torch.tensor([label_of[identifier] for identifier in classes])


CIFAR10_C = CorruptedInfo(
    name="cifar10-c",
    shape=(3, 32, 32),
    num_classes=10,
    samples=10_000,
    archive=Archive(
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
        "56bf5dcef84df0e2308c6dcbcbbd8499",
        sha256="c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
    ),
    corruptions=_array_names,
    read=_read_arrays,
)
CIFAR100_C = CorruptedInfo(
    name="cifar100-c",
    shape=(3, 32, 32),
    num_classes=100,
    samples=10_000,
    archive=Archive(
        "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar",
        "11f0ed0f1191edbf9fa23466ae6021d3",
        sha256="30ee6543a1bfd049fa33834b7c1ada301e7064b7fbe8fc38340eb8b62ced4b33",
    ),
    corruptions=_array_names,
    read=_read_arrays,
)
TINY_IMAGENET_C = CorruptedInfo(
    name="tiny-imagenet-c",
    shape=(3, 64, 64),
    num_classes=200,
    samples=10_000,
    archive=Archive("https://zenodo.org/records/8206060/files/Tiny-ImageNet-C.tar", "f9c9a9dbdc11469f0b850190f7ad8be1"),
    corruptions=_folder_names,
    read=_read_folders,
    clean=TINY_IMAGENET.archives[0],
)
CORRUPTED_SETS = {info.name: info for info in (CIFAR10_C, CIFAR100_C, TINY_IMAGENET_C)}
