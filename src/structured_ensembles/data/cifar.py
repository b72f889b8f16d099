"""CIFAR-10 and CIFAR-100, from their authors' binary versions (the Python versions are pickles)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.data.archives import read_tar
from structured_ensembles.data.info import Archive, Contents, DataInfo

SHAPE = (3, 32, 32)


def _read_cifar10(paths: Sequence[Path]) -> Contents:
    """Read the archive of CIFAR-10."""
    folder = "cifar-10-batches-bin"
    batches = [f"{folder}/data_batch_{number}.bin" for number in range(1, 6)]
    test, names, *train = read_tar(paths[0], [f"{folder}/test_batch.bin", f"{folder}/batches.meta.txt", *batches])
    return Contents(*_read_records(b"".join(train), 1), *_read_records(test, 1), _read_lines(names))


def _read_cifar100(paths: Sequence[Path]) -> Contents:
    """Read the archive of CIFAR-100, with its fine labels."""
    names = ("train.bin", "test.bin", "fine_label_names.txt")
    train, test, classes = read_tar(paths[0], [f"cifar-100-binary/{name}" for name in names])
    return Contents(*_read_records(train, 2), *_read_records(test, 2), _read_lines(classes))


def _read_records(raw: bytes, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Read images (samples, 3, 32, 32) and labels (samples,) from records of label bytes and pixels.

    CIFAR-100 has two label bytes, the coarse and the fine one; we use the last.
    """
    length = label_bytes + int(np.prod(SHAPE))
    if len(raw) % length:
        raise ValueError(f"it has {len(raw)} bytes of images, which is no multiple of {length}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, length)
    images = records[:, label_bytes:].copy().reshape(-1, *SHAPE)  # a copy: bytes are read-only, tensors are not
    return torch.from_numpy(images), torch.from_numpy(records[:, label_bytes - 1].astype(np.int64))


def _read_lines(raw: bytes) -> tuple[str, ...]:
    """Decode the lines of a text file that are not blank."""
    return tuple(line for line in raw.decode().splitlines() if line.strip())


CIFAR10 = DataInfo(
    name="cifar10",
    title="CIFAR-10: photographs of animals and vehicles",
    shape=SHAPE,
    num_classes=10,
    train=50_000,
    test=10_000,
    archives=(
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    read=_read_cifar10,
)
CIFAR100 = DataInfo(
    name="cifar100",
    title="CIFAR-100: photographs in a hundred fine classes",
    shape=SHAPE,
    num_classes=100,
    train=50_000,
    test=10_000,
    archives=(
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
    read=_read_cifar100,
)
