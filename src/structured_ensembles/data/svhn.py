"""SVHN: cropped house numbers, MATLAB files of images (height, width, channels, samples) and labels from 1 to 10."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structured_ensembles.data.archives import LARGEST
from structured_ensembles.data.info import Archive, Contents, DataInfo


def _read_svhn(paths: Sequence[Path]) -> Contents:
    """Read the files of both splits."""
    train, test = (_read_mat(path) for path in paths)
    return Contents(*train, *test, tuple("0123456789"))


def _read_mat(path: Path) -> tuple[Tensor, Tensor]:
    """Read images (samples, channels, height, width) and labels (samples,)."""
    from scipy.io import loadmat, whosmat

    try:
        sizes = {name: int(np.prod(shape)) for name, shape, _ in whosmat(path)}  # reads the shapes only
        if not all(0 < sizes.get(name, 0) <= LARGEST for name in ("X", "y")):
            raise ValueError(f"the variables X and y have {sizes.get('X', 0)} and {sizes.get('y', 0)} values")
        variables = loadmat(path, variable_names=("X", "y"))
    except (ValueError, TypeError, NotImplementedError) as error:  # SciPy raises these for unknown files
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    images, labels = variables["X"], variables["y"].astype(np.int64).ravel()
    if images.ndim != 4:
        raise ValueError(f"{path.name} has images of shape {images.shape}, not (height, width, channels, samples)")
    labels[labels == 10] = 0  # the digit 0 has the label 10
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), torch.from_numpy(labels)


SVHN = DataInfo(
    name="svhn",
    title="SVHN: digits of house numbers",
    shape=(3, 32, 32),
    num_classes=10,
    train=73_257,
    test=26_032,
    archives=(
        Archive(
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
            sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        ),
        Archive(
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "eb5a983be6a315427106f1b164d9cef3",
            sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
    ),
    read=_read_svhn,
)
