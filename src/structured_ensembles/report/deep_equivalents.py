"""Deep-ensemble equivalents of the runs on a page that has a deep ensemble too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from structured_ensembles.evaluation.deep_equivalent import deep_ensemble_equivalent
from structured_ensembles.runs.finished import Finished

FREE = ("method", "method_arguments", "members", "seed", "storage")  # settings that may differ from the deep ensemble's
EXPLANATION = (
    "Deep-ensemble equivalent: how many members of the deep ensemble have the same NLL, both with a temperature from "
    "the validation split, both as means over seeds; inf: more than it has."
)


def compute_deep_equivalents(labelled: Mapping[str, Sequence[Finished]]) -> dict[str, float]:
    """Compute the equivalents by label, for runs on one data set and network, against a deep ensemble trained alike."""
    equivalents = {}
    for label, runs in labelled.items():
        deep_runs = [
            seed_runs
            for seed_runs in labelled.values()
            if seed_runs[0].config["method"] == "deep" and _shared_settings(seed_runs) == _shared_settings(runs)
        ]
        curves = [curve for seed_runs in deep_runs if len(curve := _mean_nlls(seed_runs)) > 1]
        nlls = _mean_nlls(runs)
        if curves and nlls:
            equivalents[label] = deep_ensemble_equivalent(nlls[-1], max(curves, key=len))
    return equivalents


def _shared_settings(runs: Sequence[Finished]) -> dict[str, Any]:
    """Return the settings that must agree with the deep ensemble's."""
    return {name: value for name, value in runs[0].config.items() if name not in FREE}


def _mean_nlls(runs: Sequence[Finished]) -> list[float]:
    """Average over seeds the NLL after temperature of the first 1, 2, … members; empty if not measured."""
    known_members = runs[0].figures.get("size/members", 0.0)
    members = int(known_members) if math.isfinite(known_members) else 0
    names = [f"first/{number}/nll_t" for number in range(1, members + 1)]
    known = [run.figures for run in runs if all(name in run.figures for name in names)]
    return [fmean(figures[name] for figures in known) for name in names] if known else []
