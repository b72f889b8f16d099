"""Predictions of single pictures, and their table, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalSets
from structured_ensembles.common.tables import escape_control_characters, text_table
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.prediction.combination import combine_logits, exact_probabilities, uncertainty_of
from structured_ensembles.prediction.undecided import check_decided

MAX_LISTED = 5  # classes of a set in the table
COLUMNS = ("class", "probability", "entropy", "mutual information", "disagreement")


@dataclass(frozen=True)
class Prediction:
    """Class of a picture, how sure the ensemble is of it, and what was done to the picture.

    label: the name of the class. entropy, mutual_information: in nats. classes: of the conformal set, if there is one.
    verdict: "keep" or "discard".
    """

    picture: str
    label: str
    probability: float
    entropy: float
    mutual_information: float
    disagreement: float
    classes: list[str] | None
    verdict: str
    note: str

    def to_dict(self) -> dict[str, object]:
        """Return the fields by their names in files; without a set where the ensemble has none."""
        named = {{"label": "class", "classes": "set"}.get(name, name): value for name, value in asdict(self).items()}
        return {name: value for name, value in named.items() if name != "set" or value is not None}

    def cells(self) -> tuple[str, ...]:
        """Format the cells of its row in the table."""
        sets: tuple[str, ...] = ()
        if self.classes is not None:
            more = [f"{len(self.classes) - MAX_LISTED} more"] if len(self.classes) > MAX_LISTED else []
            sets = ("{" + ", ".join([*map(escape_control_characters, self.classes[:MAX_LISTED]), *more]) + "}",)
        return (
            escape_control_characters(self.picture),
            escape_control_characters(self.label),
            f"{100 * self.probability:.1f} %",
            f"{self.entropy:.3f}",
            f"{self.mutual_information:.3f}",
            f"{100 * self.disagreement:.0f} %",
            *sets,
            self.verdict,
            self.note,
        )


def describe_predictions(ensemble: Ensemble, logits: Tensor, pictures: Sequence[tuple[str, str]]) -> list[Prediction]:
    """Describe what logits (members, pictures, classes) say of pictures, each given by its path and a note."""
    combined = combine_logits(logits, "mean", ensemble.temperature)
    probabilities, labels = check_decided(combined, "the ensemble").max(-1)
    uncertainty = uncertainty_of(logits, ensemble.temperature)
    rule = conformal_sets(ensemble)
    sets = None if rule is None else rule.sets(exact_probabilities(logits, ensemble.temperature))
    predictions = []
    for index, (picture, note) in enumerate(pictures):
        entropy = float(uncertainty.entropy[index])
        chosen = (
            None if sets is None else [_name(ensemble, label) for label in sets[index].nonzero().flatten().tolist()]
        )
        predictions.append(
            Prediction(
                picture,
                _name(ensemble, int(labels[index])),
                float(probabilities[index]),
                entropy,
                float(uncertainty.mutual_information[index]),
                float(uncertainty.disagreement[index]),
                chosen,
                "keep" if ensemble.threshold is None or entropy <= ensemble.threshold else "discard",
                note,
            )
        )
    return predictions


def format_predictions(
    predictions: Sequence[Prediction], ensemble: Ensemble, style: Literal["table", "csv", "json"]
) -> str:
    """Format predictions as a table with its legend, as CSV with a header, or as a JSON list of objects."""
    if style == "json":
        return json.dumps([prediction.to_dict() for prediction in predictions], indent=1, ensure_ascii=False)
    if style == "csv":
        sets = ["set"] if conformal_sets(ensemble) else []
        names = ["picture", *(name.replace(" ", "_") for name in COLUMNS), *sets, "verdict", "note"]
        stream = io.StringIO()
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        for prediction in predictions:
            joined = {"set": "|".join(prediction.classes)} if prediction.classes is not None else {}
            writer.writerow(prediction.to_dict() | joined)
        return stream.getvalue().rstrip("\n")
    columns = (*COLUMNS, *(("set",) if conformal_sets(ensemble) else ()), "verdict")
    table = text_table(("picture", *columns, "note"), [prediction.cells() for prediction in predictions])
    return table + "\n" + "".join(f"\n{line}" for line in _legend(ensemble))


def _legend(ensemble: Ensemble) -> list[str]:
    """Explain the columns for this ensemble."""
    lines = [
        f"probability: at a temperature of {ensemble.temperature:.3g}; entropy and mutual information: in nats; "
        "disagreement: pairs of members that name different classes"
    ]
    if rule := conformal_sets(ensemble):
        lines.append(f"set: holds the right class for {100 * rule.coverage:g} % of pictures such as those of training")
    if ensemble.threshold is not None:
        name, share = ensemble.calibration.threshold_rule or ("", 0.0)
        why = {
            "keep": f", which keeps {100 * share:g} % of what it gets right on held-out pictures",
            "risk": f", below which at most {100 * share:g} % are wrong on held-out pictures",
        }.get(name, "")
        lines.append(f"discard: the entropy is above {ensemble.threshold:.3f}{why}")
    return lines


def conformal_sets(ensemble: Ensemble) -> ConformalSets | None:
    """Return the conformal rule of an ensemble; None if it has none."""
    rule = ensemble.calibration.conformal
    return rule if isinstance(rule, ConformalSets) else None


def _name(ensemble: Ensemble, label: int) -> str:
    """Return the name of a class; its number, if the network has more outputs than there are classes with a name."""
    return ensemble.classes[label] if label < len(ensemble.classes) else str(label)
