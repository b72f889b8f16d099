"""What is left of an ensemble under attacks and corruptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from structured_ensembles.common.progress import progress
from structured_ensembles.data import Split
from structured_ensembles.data.corrupted import CorruptedData
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.attacks import fgsm
from structured_ensembles.evaluation.calibration import expected_calibration_error
from structured_ensembles.evaluation.corruptions import EXTRA, STANDARD, corrupt
from structured_ensembles.evaluation.discarding import discarding
from structured_ensembles.evaluation.predictions import Change, predictions
from structured_ensembles.evaluation.rules import Rules, suffix_of
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of


def attack_figures(
    ensemble: Ensemble, split: Split, epsilons: Sequence[float], rules: Rules, batch_size: int
) -> dict[str, float]:
    """Measure attacks: `fgsm@0.02` is an accuracy; below it `/filtered_accuracy`, `/discarded` and `/ece`.

    The names of the second rule's figures end in it: `fgsm@0.02/logits`, `fgsm@0.02/ece/logits`.
    """
    figures: dict[str, float] = {}
    for epsilon in epsilons:

        def attack(images: Tensor, targets: Tensor, _: int, epsilon: float = epsilon) -> Tensor:
            return fgsm(ensemble, images, targets, epsilon)

        found = _figures(*predictions(ensemble, split, batch_size, attack), rules)
        figures |= _named(f"fgsm@{epsilon:g}", found)
    return figures


def corruption_figures(
    ensemble: Ensemble,
    source: Split | CorruptedData,
    names: Sequence[str],
    severities: Sequence[int],
    rules: Rules,
    batch_size: int,
    seed: int,
) -> dict[str, float]:
    """Measure corruptions: `fog@3` is an accuracy, `mean@3` a mean over the standard corruptions among `names`.

    `extra_mean@3` is the mean over the extra ones; below both means `/filtered_accuracy`, `/discarded`, `/ece`.
    source: a split, which our code corrupts with `seed`, or the official images.
    """
    figures: dict[str, float] = {}
    with progress("corruptions", len(names) * len(severities)) as advance:
        for severity in severities:
            rows: dict[str, list[dict[str, float]]] = {}  # by the mean that they belong to
            for name in names:
                split, change = _corrupted(source, name, severity, seed)
                found = _figures(*predictions(ensemble, split, batch_size, change), rules)
                rows.setdefault(mean_of(name), []).append(found)
                accuracies = {key: value for key, value in found.items() if key.startswith("accuracy")}
                figures |= _named(f"{name}@{severity}", accuracies)
                advance(accuracy=found["accuracy"])
            for mean, own in rows.items():
                figures |= _named(f"{mean}@{severity}", {key: _mean(row.get(key) for row in own) for key in own[0]})
    return figures


def mean_of(name: str) -> str:
    """Name the mean that a corruption counts in."""
    return "extra_mean" if name in EXTRA else "mean"


def is_over_all(figures: Mapping[str, float], severity: int, kind: str = "cor") -> bool:
    """Tell whether there is a mean at this severity over all standard corruptions, and over no others.

    kind: "cor", computed by our code, or "official". Extra corruptions without a mean of their own come from a time
    when one mean was over all.
    """
    if any(f"{kind}/{name}@{severity}" in figures for name in EXTRA) and f"{kind}/extra_mean@{severity}" not in figures:
        return False
    return all(f"{kind}/{name}@{severity}" in figures for name in ["mean", *STANDARD])


def best_source(figures: Sequence[Mapping[str, float]], severity: int) -> str:
    """Name the kind of corrupted images to show of several runs: "official" if all were measured on them, or "cor"."""
    whole = bool(figures) and all(is_over_all(own, severity, "official") for own in figures)
    return "official" if whole else "cor"


def _corrupted(source: Split | CorruptedData, name: str, severity: int, seed: int) -> tuple[Split, Change | None]:
    if isinstance(source, CorruptedData):
        return source.split(name, severity), None
    return source, lambda images, _, first: corrupt(images, name, severity, seed, first=first)


def _figures(logits: Tensor, targets: Tensor, rules: Rules) -> dict[str, float]:
    figures: dict[str, float] = {}
    for rule, threshold in rules.items():
        probabilities = combine_logits(logits, rule)
        correct = probabilities.argmax(-1) == targets
        found = {
            "accuracy": float(correct.double().mean()),
            "ece": expected_calibration_error(probabilities, targets),
        }
        if threshold is not None:
            left = discarding(uncertainty_of(logits, combine=rule).entropy, correct, threshold)
            found |= {"filtered_accuracy": left.filtered_accuracy, "discarded": left.discarded}
        figures |= {f"{name}{suffix_of(rule, rules)}": value for name, value in found.items()}
    return figures


def _named(name: str, found: Mapping[str, float]) -> dict[str, float]:
    """The accuracy under the name itself, the others below it; without those that do not exist."""
    known = {key: value for key, value in found.items() if not math.isnan(value)}
    return {f"{name}/{key}".replace("/accuracy", ""): value for key, value in known.items()}


def _mean(values: Iterable[Any]) -> float:
    """Of those that exist: where everything is discarded, there is no filtered accuracy."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")
