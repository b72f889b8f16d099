"""scikit-learn's handwritten digits: 1,797 real images of 8×8 pixels that need no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from structured_ensembles.data.dataset import Data
from structured_ensembles.data.normalization import Choice
from structured_ensembles.data.splits import hold_out


def read_digits(
    seed: int = 0, normalization: Choice = "auto", *, test_share: float = 0.2, validation_share: float = 0.1
) -> Data:
    """Read the digits: a fifth of every class is the test split, always the same; `seed` draws the validation split.

    test_share, validation_share: of all images, and of those that are left.
    """
    values, labels = _read_table()
    images = np.round(values * (255 / 16)).astype(np.uint8)[:, None]
    train, test = (index.numpy() for index in hold_out(torch.from_numpy(labels), test_share, seed=0))
    return Data.from_arrays(
        images[train],
        labels[train],
        test=(images[test], labels[test]),
        validation=validation_share,
        classes=10,
        seed=seed,
        name="digits",
        normalization=normalization,
    )


def _read_table() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read values from 0 to 16, shape (samples, 8, 8), and labels, shape (samples,), from scikit-learn's own file.

    Importing scikit-learn takes a second, and nothing else of the core needs it; it is asked where the file is not.
    """
    spec = find_spec("sklearn")
    path = Path(str(spec.origin)).parent / "datasets" / "data" / "digits.csv.gz" if spec else None
    if path is not None and path.is_file():
        table = np.loadtxt(path, delimiter=",")  # a row: 64 values and the label
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target
