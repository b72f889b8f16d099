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
    """Read the four files of a data set."""
    train_images, test_images = (_read_idx(path, dimensions=3).unsqueeze(1) for path in paths[0::2])
    train_labels, test_labels = (_read_idx(path, dimensions=1).long() for path in paths[1::2])
    return Contents(train_images, train_labels, test_images, test_labels, classes)


def _read_idx(path: Path, dimensions: int) -> Tensor:
    """Read the uint8 tensor of an idx file: two zero bytes, type, number of dimensions, the dimensions, the values."""
    with gzip.open(path) as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
            raise ValueError(f"{path.name} is not an idx file of bytes with {dimensions} dimensions")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        size = math.prod(shape)
        if not 0 < size <= LARGEST:
            raise ValueError(f"{path.name} claims the shape {shape}")
        values = bytearray(file.read(size + 1))
    if len(values) != size:
        raise ValueError(f"{path.name} does not have the {size} bytes that its shape {shape} needs")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def _archives(mirror: str, folder: str, checksums: Sequence[tuple[str, str]]) -> tuple[Archive, ...]:
    """List the four files with their checksums, md5 and SHA-256."""
    return tuple(
        Archive(mirror + file, md5, folder, sha256) for file, (md5, sha256) in zip(FILES, checksums, strict=True)
    )


MNIST = DataInfo(
    name="mnist",
    title="MNIST: handwritten digits",
    shape=(1, 28, 28),
    num_classes=10,
    train=60_000,
    test=10_000,
    archives=_archives(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",  # the authors' server refuses downloads by programs
        "mnist",
        (
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            ("d53e105ee54ea40749a09fcbcd1e9432", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            ("9fb629c4189551a2d022fa330f9573f3", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            ("ec29112dd5afa0611ce80d1b7f02629c", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
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
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",  # their other server has no https
        "fashion-mnist",
        (
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            ("25c81989df183df01b3e8a0aad5dffbe", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            ("bef4ecab320f06d8554ea6380940ec79", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            ("bb300cfdad3c16e7a12a480ee83cd310", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    read=partial(_read_mnist, classes=CLOTHES),
)
