"""Evaluations of a run: one record for each split and rule of combination; figures are added, none is lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structured_ensembles.ensemble import Combine
from structured_ensembles.evaluation.robustness import name_of_mean
from structured_ensembles.storage.run_files import checked_figures, damaged, read_json, write_json

RULES: tuple[Combine, ...] = ("mean", "logits")  # of combination: ours, and that of the published figures


def evaluation_path(folder: Path, rule: Combine = "mean") -> Path:
    """Return the path of the figures of a run on the test split."""
    return folder / f"evaluation-test-{rule}.json"


def read_figures(path: Path) -> dict[str, float]:
    """Read the figures of an evaluation; none if there was none."""
    found: dict[str, float] = _read_evaluation(path)["figures"] if path.exists() else {}
    return found


def merge_figures(path: Path, figures: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    """Write the figures beside those that are in the file already; the new ones win. Returns all of them."""
    before = _read_evaluation(path) if path.exists() else {"figures": {}}
    known = before["figures"]
    merged = _without_partial_means({**known, **figures}, known, figures)
    write_json(path, {**before, **record, "figures": merged})
    return merged


def _read_evaluation(path: Path) -> dict[str, Any]:
    """Read the record of an evaluation and check its figures."""
    remedy = "delete it, and evaluate again"
    record = read_json(path, remedy)
    try:
        return {**record, "figures": checked_figures(record.get("figures"))}
    except ValueError as error:
        raise damaged(path, error, remedy) from error


def _without_partial_means(
    merged: Mapping[str, float], known: Mapping[str, float], figures: Mapping[str, float]
) -> dict[str, float]:
    """Drop means over corruptions (`cor/mean@3`, …) that leave out any corruption of the merged figures."""

    def listed(own: Mapping[str, float], kind: str, mean: str, severity: str) -> set[str]:
        names = {name.removeprefix(f"{kind}/").partition("@")[0] for name in own if name.startswith(f"{kind}/")}
        own_names = {name for name in names - {"mean", "extra_mean"} if name_of_mean(name) == mean}
        return {name for name in own_names if f"{kind}/{name}@{severity}" in own}

    result = dict(merged)
    for name in [name for name in merged if "mean@" in name]:
        kind, mean, severity = re.split("[/@]", name)[:3]
        everything = listed(merged, kind, mean, severity)
        whole = [own for own in (figures, known) if name in own and listed(own, kind, mean, severity) == everything]
        if whole:
            result[name] = whole[0][name]
        elif everything:
            del result[name]
    return result
