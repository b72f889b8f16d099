"""scikit-learn's handwritten digits: 1,797 real images of 8×8 pixels that need no download."""

import numpy as np
import torch

from structured_ensembles.data.dataset import Data
from structured_ensembles.data.normalization import Choice
from structured_ensembles.data.splits import hold_out


def read_digits(
    seed: int = 0, normalization: Choice = "auto", *, test_share: float = 0.2, validation_share: float = 0.1
) -> Data:
    """Read the digits: a fifth of every class is the test split, always the same; `seed` draws the validation split.

    test_share, validation_share: of all images, and of those that are left.
    """
    from sklearn.datasets import load_digits  # a second to import, and needed for nothing else of the core

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = bunch.target
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
