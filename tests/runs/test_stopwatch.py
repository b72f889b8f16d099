"""Seconds of a run count all its starts, also of processes that were killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from structured_ensembles.continual.experiment import ContinualExperiment, prepare_continual, run_prepared
from structured_ensembles.runs import stopwatch
from structured_ensembles.runs.experiment import Experiment, prepare_experiment, train_prepared
from structured_ensembles.runs.finished import read_run_seconds
from structured_ensembles.runs.stopwatch import ELAPSED, run_stopwatch
from structured_ensembles.storage.run_files import read_json, write_json
from structured_ensembles.training.history import COLUMNS


def test_seconds_go_on_from_an_interrupt(tmp_path: Path) -> None:
    def interrupted() -> None:
        with run_stopwatch(tmp_path):
            time.sleep(0.2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    saved = read_json(tmp_path / ELAPSED, "")["seconds"]
    assert 0.2 <= saved < 5
    with run_stopwatch(tmp_path) as watch:
        assert saved <= watch.seconds < saved + 5


def test_seconds_of_a_killed_process_are_counted(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time; from structured_ensembles.runs import stopwatch; stopwatch.INTERVAL = 0.05\n"
        "with stopwatch.run_stopwatch(pathlib.Path(sys.argv[1])): time.sleep(0.5); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    with run_stopwatch(tmp_path) as watch:
        assert 0.3 < watch.seconds < 30


def interrupt(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def train_interrupted(folder: Path) -> dict[str, Any]:
    """Train a small ensemble whose first start is interrupted an hour after it began; return its result."""
    experiment = Experiment("digits", "lenet5", "single", members=1, changes={"epochs": 1}, limit=64)
    prepared = prepare_experiment(experiment, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train_prepared(replace(prepared, make=interrupt), folder, quiet=True)
    assert read_json(folder / ELAPSED, "")["seconds"] < 60
    write_json(folder / ELAPSED, {"seconds": 3600.0})
    return train_prepared(prepared, folder, quiet=True)[0]


def learn_interrupted(folder: Path) -> dict[str, Any]:
    """Learn tasks as `train_interrupted` trains."""
    experiment = ContinualExperiment("digits", "lenet5", "naive", method_arguments={"epochs": 1}, limit=64)
    prepared = prepare_continual(experiment, device="cpu", quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared.learner, "learn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_prepared(prepared, folder)
    write_json(folder / ELAPSED, {"seconds": 3600.0})
    return run_prepared(prepared, folder)[0]


@pytest.mark.parametrize("run", [train_interrupted, learn_interrupted])
def test_result_counts_the_seconds_of_all_starts(run: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    assert 3600 < run(tmp_path / "run")["seconds"] < 3660
    assert not (tmp_path / "run" / ELAPSED).exists()


def test_file_that_cannot_be_written_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the thread that writes now and then, whose errors pytest reports, nor the end of the run."""
    monkeypatch.setattr(stopwatch, "INTERVAL", 0.01)
    written: list[Path] = []

    def fail(path: Path, _: object) -> None:
        written.append(path)
        raise OSError("the disk is full")

    monkeypatch.setattr(stopwatch, "write_json", fail)
    with run_stopwatch(tmp_path) as watch:
        time.sleep(0.1)
    assert watch.seconds >= 0.1
    assert len(written) > 2


@pytest.mark.parametrize("content", ['{"seconds": -1}', '{"seconds": "1"}', "{}", "[1]", "1e400", ""])
def test_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / ELAPSED).write_text(content)
    with pytest.raises(ValueError, match=rf"{ELAPSED} is damaged: .*; delete it"), run_stopwatch(tmp_path):
        pass


@pytest.mark.parametrize(("recorded", "expected"), [(3.0, 7.5), (9.0, 9.0)])
def test_results_of_runs_resumed_earlier_count_all_epochs(recorded: float, expected: float, tmp_path: Path) -> None:
    """An epoch's seconds are those of all members together, and stand in the row of each."""
    rows = [",".join(COLUMNS), *(f"{epoch},{member},0.1,1,1,0.5,2.5" for epoch in range(3) for member in range(2))]
    (tmp_path / "history.csv").write_text("\n".join(rows) + "\n")
    assert read_run_seconds(tmp_path, {"seconds": recorded}) == expected
