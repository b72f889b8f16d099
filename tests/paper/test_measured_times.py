"""Estimates follow the measured times of finished runs on an H200."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from structured_ensembles.paper.estimates import estimate_checkpoint_bytes, estimate_training_seconds
from structured_ensembles.paper.measured_times import (
    compute_ratios,
    find_correction,
    follow_measured_times,
    list_likenesses,
    read_seconds,
)
from structured_ensembles.paper.sections import Planned, plan_runs
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.storage.run_files import write_json
from tests.support.paths import ROOT

RECORDED = read_seconds(plan_runs(), ROOT / "results")


def assert_mostly_within(factor: float, off: Sequence[float]) -> None:
    """Assert that nine of ten ratios are nearer to 1: some runs had the GPU to themselves, some shared it with two."""
    assert sum(1 / factor < ratio < factor for ratio in off) >= 0.9 * len(off), sorted(off)


def test_recorded_runs_take_about_as_long_as_estimated() -> None:
    ratios = compute_ratios(RECORDED)
    assert len(RECORDED) >= 20
    off = [
        seconds / (find_correction(experiment, ratios) * estimate_training_seconds(experiment))
        for experiment, seconds in RECORDED
    ]
    assert 0.8 < median(off) < 1.25
    assert_mostly_within(2, off)


def test_checkpoints_of_a_taught_run_hold_teachers_and_members() -> None:
    """Four teachers stay while members in the memory of one network train: five networks in all."""
    arguments = {"memory": 1.0, "teachers": 4}
    single = Experiment("cifar10", "resnet18", "single", 0, 1, {}, {}, "modern", {})
    taught = replace(single, method="taught", members=2, method_arguments=arguments)
    assert estimate_checkpoint_bytes(taught) == 5 * estimate_checkpoint_bytes(single)


def test_estimate_of_a_run_from_the_others_like_it_is_near_its_time() -> None:
    off = []
    for number, (experiment, seconds) in enumerate(RECORDED):
        ratios = compute_ratios(RECORDED[:number] + RECORDED[number + 1 :])
        if any(likeness in ratios for likeness in list_likenesses(experiment)):
            off.append(seconds / (find_correction(experiment, ratios) * estimate_training_seconds(experiment)))
    assert len(off) >= 15
    assert_mostly_within(2, off)


def write_run(out: Path, run: Planned, seconds: float, device: str = "NVIDIA H200") -> None:
    record = {"figures": {}, "seconds": seconds, "date": "2026-11-16", "device": device, "versions": {}}
    write_json(out / run.name / "result.json", record)


def test_closest_finished_runs_correct_an_estimate(tmp_path: Path) -> None:
    experiment = Experiment("cifar10", "resnet20", "deep", seed=0, members=5, recipe="paper")
    runs = [
        Planned("a", experiment),
        Planned("a", replace(experiment, seed=1)),
        Planned("a", replace(experiment, dataset="cifar100")),
        Planned("a", replace(experiment, recipe="modern")),
        Planned("a", replace(experiment, method="single")),
    ]
    seconds = [estimate_training_seconds(run.experiment) for run in runs]
    write_run(tmp_path, runs[0], 2 * seconds[0])
    write_run(tmp_path, runs[2], 4 * seconds[2])
    write_run(tmp_path, runs[4], 9 * seconds[4], device="CPU, 1 threads")  # says nothing of an H200
    minutes = [run.minutes for run in follow_measured_times(runs, tmp_path)]
    # The same but the seed: 2. The same network, method and training: itself, 4. Another recipe: the mean of both.
    expected = [2 * seconds[0], 2 * seconds[1], 4 * seconds[2], 3 * seconds[3], seconds[4]]
    assert [60 * value for value in minutes] == pytest.approx(expected)


def test_runs_of_the_same_training_come_before_those_of_the_same_network() -> None:
    paper = Experiment("cifar10", "resnet20", "deep", recipe="paper")
    modern = replace(paper, recipe="modern")
    seconds = [(paper, 2.0), (replace(paper, dataset="cifar100"), 4.0), (modern, 9.0)]
    ratios = compute_ratios([(run, times * estimate_training_seconds(run)) for run, times in seconds])
    svhn = replace(paper, dataset="svhn")
    expected = [
        (paper, 2.0),  # the same but the seed
        (svhn, 3.0),  # trained alike: 2 and 4
        (replace(svhn, recipe="regression"), 5.0),  # the same network and method: 2, 4 and 9
        (replace(svhn, method="single"), 1.0),
    ]
    for run, correction in expected:
        assert find_correction(run, ratios) == pytest.approx(correction)
