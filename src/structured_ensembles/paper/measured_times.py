"""Estimates that follow measured times: finished runs on an H200 correct the estimates of runs like them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from structured_ensembles.paper.estimates import estimate_training_seconds
from structured_ensembles.paper.sections import Planned, Run
from structured_ensembles.runs.finished import read_run_seconds
from structured_ensembles.runs.folder import read_result

DEVICE = "NVIDIA H200"
Ratios = Mapping[str, Sequence[float]]  # measured over estimated seconds, by likeness


def follow_measured_times(planned: Sequence[Planned], out: Path) -> list[Planned]:
    """Return the planned runs with estimates that follow the finished runs below `out`."""
    ratios = compute_ratios(read_seconds(planned, out))
    return [replace(run, correction=find_correction(run.experiment, ratios)) for run in planned]


def read_seconds(planned: Sequence[Planned], out: Path) -> list[tuple[Run, float]]:
    """Read the seconds of all runs that were trained on an H200."""
    trained = [(run.experiment, out / run.name) for run in planned if (out / run.name / "result.json").exists()]
    results = [(experiment, folder, read_result(folder)) for experiment, folder in trained]
    return [
        (experiment, read_run_seconds(folder, result))
        for experiment, folder, result in results
        if result["device"] == DEVICE
    ]


def compute_ratios(seconds: Sequence[tuple[Run, float]]) -> Ratios:
    """Collect the ratios of measured to estimated seconds under every likeness of every run."""
    ratios: dict[str, list[float]] = {}
    for experiment, measured in seconds:
        for likeness in list_likenesses(experiment):
            ratios.setdefault(likeness, []).append(measured / estimate_training_seconds(experiment))
    return ratios


def find_correction(experiment: Run, ratios: Ratios) -> float:
    """Return the mean ratio of the runs most like this one; 1 if there is none."""
    return next((fmean(ratios[likeness]) for likeness in list_likenesses(experiment) if likeness in ratios), 1.0)


def list_likenesses(experiment: Run) -> Iterator[str]:
    """Yield the likenesses of a run, the closest first; runs are alike if they have one in common.

    The closest is all but the seed; then network, method and training; last network and method, since the estimate
    itself follows epochs, members and images.
    """
    config = experiment.config()
    network = {name: config.get(name) for name in ("model", "model_arguments", "method")}
    training = {name: config.get(name) for name in ("recipe", "changes")}
    yield _name({**config, "seed": None})
    yield _name({**network, **training})
    yield _name(network)


def _name(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)
