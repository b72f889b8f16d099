"""What is left of an ensemble under attacks and corruptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from structured_ensembles.data import Split
from structured_ensembles.data.corrupted import CorruptedData
from structured_ensembles.ensemble import Combine, Ensemble, combined, uncertainty_of
from structured_ensembles.evaluation.attacks import fgsm
from structured_ensembles.evaluation.calibration import expected_calibration_error
from structured_ensembles.evaluation.corruptions import CORRUPTIONS, corrupt
from structured_ensembles.evaluation.discarding import discarding
from structured_ensembles.evaluation.predictions import Change, predictions
from structured_ensembles.progress import progress


def attack_figures(
    ensemble: Ensemble, split: Split, epsilons: Sequence[float], combine: Combine, batch_size: int
) -> dict[str, float]:
    """`fgsm@0.02` is the accuracy; below it `/filtered_accuracy`, `/discarded` and `/ece`."""
    figures: dict[str, float] = {}
    for epsilon in epsilons:

        def attack(images: Tensor, targets: Tensor, _: int, epsilon: float = epsilon) -> Tensor:
            return fgsm(ensemble, images, targets, epsilon)

        found = _figures(ensemble, *predictions(ensemble, split, batch_size, attack), combine)
        figures |= _named(f"fgsm@{epsilon:g}", found)
    return figures


def corruption_figures(
    ensemble: Ensemble,
    source: Split | CorruptedData,
    names: Sequence[str],
    severities: Sequence[int],
    combine: Combine,
    batch_size: int,
    seed: int,
) -> dict[str, float]:
    """`fog@3` is an accuracy; `mean@3` the mean over the corruptions, with `/filtered_accuracy`, `/discarded`, `/ece`.

    source: a split, which our code corrupts with `seed`, or the official images.
    """
    figures: dict[str, float] = {}
    with progress("corruptions", len(names) * len(severities)) as advance:
        for severity in severities:
            rows = []
            for name in names:
                split, change = _corrupted(source, name, severity, seed)
                rows.append(_figures(ensemble, *predictions(ensemble, split, batch_size, change), combine))
                figures[f"{name}@{severity}"] = rows[-1]["accuracy"]
                advance(accuracy=rows[-1]["accuracy"])
            figures |= _named(f"mean@{severity}", {key: _mean(row.get(key) for row in rows) for key in rows[0]})
    return figures


def is_over_all(figures: Mapping[str, float], severity: int) -> bool:
    """Whether there is a mean at this severity, and it is over all corruptions (grey images have no saturation)."""
    names = [name for name in CORRUPTIONS if name != "saturate"]
    return all(f"cor/{name}@{severity}" in figures for name in ["mean", *names])


def _corrupted(source: Split | CorruptedData, name: str, severity: int, seed: int) -> tuple[Split, Change | None]:
    if isinstance(source, CorruptedData):
        return source.split(name, severity), None
    return source, lambda images, _, first: corrupt(images, name, severity, seed, first=first)


def _figures(ensemble: Ensemble, logits: Tensor, targets: Tensor, combine: Combine) -> dict[str, float]:
    probabilities = combined(logits, combine)
    correct = probabilities.argmax(-1) == targets
    found = {
        "accuracy": float(correct.double().mean()),
        "ece": expected_calibration_error(probabilities, targets),
    }
    if ensemble.calibration.paper_threshold is not None:
        left = discarding(uncertainty_of(logits).entropy, correct, ensemble.calibration.paper_threshold)
        found |= {"filtered_accuracy": left.filtered_accuracy, "discarded": left.discarded}
    return found


def _named(name: str, found: dict[str, float]) -> dict[str, float]:
    """The accuracy under the name itself, the others below it; without those that do not exist."""
    others = {f"{name}/{key}": value for key, value in found.items() if key != "accuracy" and not math.isnan(value)}
    return {name: found["accuracy"], **others}


def _mean(values: Iterable[Any]) -> float:
    """Of those that exist: where everything is discarded, there is no filtered accuracy."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")
