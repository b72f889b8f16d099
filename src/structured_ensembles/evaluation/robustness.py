"""Figures under attacks and corruptions: accuracy, ECE and discarding."""

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
from structured_ensembles.evaluation.discarding import measure_discarding
from structured_ensembles.evaluation.predictions import Change, gather_predictions
from structured_ensembles.evaluation.rules import Rules, suffix_of
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of


def measure_attacks(
    ensemble: Ensemble, split: Split, epsilons: Sequence[float], rules: Rules, batch_size: int
) -> dict[str, float]:
    """Measure attacks: `fgsm@0.02` is an accuracy; below it `/filtered_accuracy`, `/discarded` and `/ece`.

    The names of the second rule's figures end in it: `fgsm@0.02/logits`, `fgsm@0.02/ece/logits`.
    """
    figures: dict[str, float] = {}
    for epsilon in epsilons:

        def attack(images: Tensor, targets: Tensor, _: int, epsilon: float = epsilon) -> Tensor:
            return fgsm(ensemble, images, targets, epsilon)

        attacked = _figures(*gather_predictions(ensemble, split, batch_size, attack), rules)
        figures |= _name_figures(f"fgsm@{epsilon:g}", attacked)
    return figures


def measure_corruptions(
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
    source: a split to corrupt with `seed`, or the official images.
    """
    figures: dict[str, float] = {}
    with progress("corruptions", len(names) * len(severities)) as advance:
        for severity in severities:
            rows: dict[str, list[dict[str, float]]] = {}  # by the mean that they count in
            for name in names:
                split, change = _corrupted_split(source, name, severity, seed)
                corrupted = _figures(*gather_predictions(ensemble, split, batch_size, change), rules)
                rows.setdefault(name_of_mean(name), []).append(corrupted)
                accuracies = {key: value for key, value in corrupted.items() if key.startswith("accuracy")}
                figures |= _name_figures(f"{name}@{severity}", accuracies)
                advance(accuracy=corrupted["accuracy"])
            for mean, mean_rows in rows.items():
                figures |= _name_figures(
                    f"{mean}@{severity}", {key: _mean(row.get(key) for row in mean_rows) for key in mean_rows[0]}
                )
    return figures


def name_of_mean(name: str) -> str:
    """Name the mean that a corruption counts in."""
    return "extra_mean" if name in EXTRA else "mean"


def is_over_all(figures: Mapping[str, float], severity: int, family: str = "cor") -> bool:
    """Tell whether the figures have the mean at this severity over exactly the standard corruptions.

    family: "cor", computed by our code, or "official". Where extra corruptions have no separate mean, the figures are
    of an earlier version, whose one mean was over all.
    """
    if (
        any(f"{family}/{name}@{severity}" in figures for name in EXTRA)
        and f"{family}/extra_mean@{severity}" not in figures
    ):
        return False
    return all(f"{family}/{name}@{severity}" in figures for name in ["mean", *STANDARD])


def best_source(figures: Sequence[Mapping[str, float]], severity: int) -> str:
    """Choose the family of corruption figures to show for several runs: "official" if all have it, else "cor"."""
    official = bool(figures) and all(is_over_all(run_figures, severity, "official") for run_figures in figures)
    return "official" if official else "cor"


def _corrupted_split(source: Split | CorruptedData, name: str, severity: int, seed: int) -> tuple[Split, Change | None]:
    """Return the split to predict and the change of its inputs; official images need none."""
    if isinstance(source, CorruptedData):
        return source.split(name, severity), None
    return source, lambda images, _, first: corrupt(images, name, severity, seed, first=first)


def _figures(logits: Tensor, targets: Tensor, rules: Rules) -> dict[str, float]:
    """Compute accuracy, ECE and discarding for every rule; logits (members, samples, classes), targets (samples,)."""
    figures: dict[str, float] = {}
    for rule, threshold in rules.items():
        probabilities = combine_logits(logits, rule)
        correct = probabilities.argmax(-1) == targets
        rule_figures = {
            "accuracy": float(correct.double().mean()),
            "ece": expected_calibration_error(probabilities, targets),
        }
        if threshold is not None:
            kept = measure_discarding(uncertainty_of(logits, combine=rule).entropy, correct, threshold)
            rule_figures |= {"filtered_accuracy": kept.filtered_accuracy, "discarded": kept.discarded}
        figures |= {f"{name}{suffix_of(rule, rules)}": value for name, value in rule_figures.items()}
    return figures


def _name_figures(name: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Put the accuracy under the name itself and other figures below it; leave NaN out."""
    known = {key: value for key, value in figures.items() if not math.isnan(value)}
    return {f"{name}/{key}".replace("/accuracy", ""): value for key, value in known.items()}


def _mean(values: Iterable[Any]) -> float:
    """Average the values without None and NaN: where everything is discarded, there is no filtered accuracy."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else float("nan")
