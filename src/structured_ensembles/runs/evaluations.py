"""Evaluations of a run: one JSON record per split and combination rule, to which figures are added."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structured_ensembles.data.dataset import SplitName
from structured_ensembles.evaluation.robustness import name_of_mean
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.storage.run_files import check_figures, damaged_file_error, read_json, write_json

RULES: tuple[Combine, ...] = ("mean", "logits")  # combination rules: ours, and the one of the published figures


def evaluation_path(folder: Path, rule: Combine = "mean", split: SplitName = "test") -> Path:
    """Return the path of the figures of a run on a split; every split has files of its own."""
    return folder / f"evaluation-{split}-{rule}.json"


def read_figures(path: Path) -> dict[str, float]:
    """Read the figures of an evaluation; return an empty dict if there was none."""
    figures: dict[str, float] = _read_evaluation(path)["figures"] if path.exists() else {}
    return figures


def merge_figures(path: Path, figures: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Merge figures into those of the file, where new ones replace old ones; return all of them.

    Those of the validation split are without what was fitted on it, see `is_fitted`: by them, runs are chosen.
    """
    before = _read_evaluation(path) if path.exists() else {"figures": {}}
    known = before["figures"]
    merged = _drop_partial_means({**known, **figures}, known, figures)
    if record["split"] == "validation":
        merged = {name: value for name, value in merged.items() if not is_fitted(name)}
    write_json(path, {**before, **record, "figures": merged})
    return merged


def is_fitted(name: str) -> bool:
    """Tell whether a figure depends on a temperature, threshold or conformal set, fitted to the validation split."""
    plain = name
    for rule in RULES:
        plain = plain.removesuffix(f"/{rule}")
    return name.startswith(("unc/", "conf/")) or plain.endswith(("_t", "/filtered_accuracy", "/discarded"))


def _read_evaluation(path: Path) -> dict[str, Any]:
    """Read the record of an evaluation and check its figures."""
    remedy = "delete it and evaluate again"
    record = read_json(path, remedy)
    try:
        return {**record, "figures": check_figures(record.get("figures"))}
    except ValueError as error:
        raise damaged_file_error(path, error, remedy) from error


def _drop_partial_means(
    merged: Mapping[str, float], known: Mapping[str, float], figures: Mapping[str, float]
) -> dict[str, float]:
    """Drop means over corruptions (`cor/mean@3`, …) that leave out any corruption of the merged figures."""

    def list_averaged(source: Mapping[str, float], family: str, mean: str, severity: str) -> set[str]:
        names = {name.removeprefix(f"{family}/").partition("@")[0] for name in source if name.startswith(f"{family}/")}
        averaged = {name for name in names - {"mean", "extra_mean"} if name_of_mean(name) == mean}
        return {name for name in averaged if f"{family}/{name}@{severity}" in source}

    result = dict(merged)
    for name in [name for name in merged if "mean@" in name]:
        family, mean, severity = re.split("[/@]", name)[:3]
        corruptions = list_averaged(merged, family, mean, severity)
        complete = [
            source
            for source in (figures, known)
            if name in source and list_averaged(source, family, mean, severity) == corruptions
        ]
        if complete:
            result[name] = complete[0][name]
        elif corruptions:
            del result[name]
    return result
