"""MNIST and Fashion-MNIST, which share one format: gzipped idx files."""

import gzip
import math
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from structured_ensembles.data.archives import LARGEST
from structured_ensembles.data.info import Archive, Contents, DataInfo

UNSIGNED_BYTES = 8  # idx's code for the type of the values
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def _read_mnist(paths: Sequence[Path], classes: tuple[str, ...]) -> Contents:
    train_images, test_images = (_read_idx(path, dimensions=3).unsqueeze(1) for path in paths[0::2])
    train_labels, test_labels = (_read_idx(path, dimensions=1).long() for path in paths[1::2])
    return Contents(train_images, train_labels, test_images, test_labels, classes)


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor of an idx file: two zero bytes, type, number of dimensions, the dimensions, the values."""
    with gzip.open(path) as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
            raise ValueError(f"{path.name} is no idx file of bytes with {dimensions} dimensions")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        size = math.prod(shape)
        if not 0 < size <= LARGEST:
            raise ValueError(f"{path.name} claims the shape {shape}")
        values = bytearray(file.read(size + 1))
    if len(values) != size:
        raise ValueError(f"{path.name} does not have the {size} bytes that its shape {shape} needs")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def _archives(mirror: str, folder: str, checksums: Sequence[str]) -> tuple[Archive, ...]:
    return tuple(Archive(mirror + file, md5, folder) for file, md5 in zip(FILES, checksums, strict=True))


MNIST = DataInfo(
    name="mnist",
    title="MNIST: handwritten digits",
    shape=(1, 28, 28),
    num_classes=10,
    train=60_000,
    test=10_000,
    archives=_archives(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # the authors' own server turns programs away
        "mnist",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    read=partial(_read_mnist, classes=DIGITS),
)
FASHION_MNIST = DataInfo(
    name="fashion-mnist",
    title="Fashion-MNIST: pictures of clothes",
    shape=(1, 28, 28),
    num_classes=10,
    train=60_000,
    test=10_000,
    archives=_archives(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    read=partial(_read_mnist, classes=CLOTHES),
)
