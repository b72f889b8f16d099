"""Measure how much every corruption changes CIFAR-10's images: ours beside the published formulas.

    python benchmarks/corruption_rmse.py [--images 1000] [--root FOLDER] [--frost FOLDER] [--json FILE]

Root mean squared differences of pixels in [0,1] from the clean images, over all images and pixels. The published
formulas are computed image by image in NumPy and SciPy (tests/support/published_corruptions.py). Our frost has the
published shares and synthetic ice; the published frost lays photographs over the image, which we may not ship: --frost
is the folder ImageNet-C/create_c of github.com/hendrycks/robustness, which has them. Without it, frost has no published
row.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import structured_ensembles as se
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support import published_corruptions as reference

FROST = "ours: the published shares over ice of our own; published: over their photographs"


def main() -> None:
    """Compute the distances of every corruption and print the table."""
    arguments = arguments_of(__doc__, only_cpu=True, images=1000, root="", frost="", seed=0)
    test = se.load_data("cifar10", arguments.root or None).split("test")
    images = next(iter(test.batches(arguments.images)))[0]
    if arguments.frost:
        reference.FORMULAS["frost"] = reference.frost(reference.read_pictures(Path(arguments.frost)))
    distances = {}
    for name in CORRUPTIONS:
        rows = {"ours": [distance_of_ours(images, name, severity, arguments.seed) for severity in SEVERITIES]}
        if name in reference.FORMULAS:
            rows["published"] = [
                distance_of_published(images, name, severity, arguments.seed) for severity in SEVERITIES
            ]
        distances[name] = rows
    shown = [
        (name, source, *(f"{value:.3f}" for value in values))
        for name, rows in distances.items()
        for source, values in rows.items()
    ]
    print(f"{len(images):,} images of CIFAR-10\n")
    print(text_table(("corruption", "", *map(str, SEVERITIES)), shown))
    print(f"\nfrost, {FROST}")
    record(arguments, {name: rows | ({"note": FROST} if name == "frost" else {}) for name, rows in distances.items()})


def distance_of_ours(images: torch.Tensor, name: str, severity: int, seed: int) -> float:
    """Compute the RMSE between our corrupted images and the clean ones."""
    changed = corrupt(images.float() / 255, name, severity, seed)
    return reference.rmse((255 * changed).numpy(), images.numpy())


def distance_of_published(images: torch.Tensor, name: str, severity: int, seed: int) -> float:
    """Compute the RMSE between the published formula's images and the clean ones."""
    numbers = reference.Generated(seed)
    changed = np.stack([reference.published(image, name, severity, numbers) for image in images.numpy()])
    return reference.rmse(changed, images.numpy())


if __name__ == "__main__":
    main()
