"""sens reproduce queue: every run of the studies once, in order; finished runs are not done again."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import yaml

from structured_ensembles import zoo
from structured_ensembles.cli.main import main
from structured_ensembles.experiment import Experiment, read_data, train_experiment
from structured_ensembles.grid import Job, run_grid
from structured_ensembles.paper.catalogue import study, study_names
from structured_ensembles.paper.queue import KEPT, is_finished
from structured_ensembles.paper.sections import ABSOLUTE_CHECK, planned_runs
from structured_ensembles.paper.studies import EVERYTHING, Part

ROOT = Path(__file__).parent.parent


def sleeper(seconds: float, path: Path) -> None:
    time.sleep(seconds)
    path.write_text(str(os.getpid()))


def test_a_grid_ends_in_time_and_starts_what_fits(tmp_path: Path) -> None:
    jobs = [
        Job("long", sleeper, {"seconds": 60.0, "path": tmp_path / "long"}, seconds=1.0),  # a wrong estimate
        Job("too long", sleeper, {"seconds": 0.0, "path": tmp_path / "too long"}, seconds=1000.0),
        Job("short", sleeper, {"seconds": 0.0, "path": tmp_path / "short"}, seconds=1.0),
    ]
    start = time.monotonic()
    told = []
    outcomes = run_grid(jobs, workers=2, quiet=True, time_limit=9.0, on_outcome=lambda own: told.append(own.name))
    assert time.monotonic() - start < 30
    assert [own.state for own in outcomes] == ["left", "left", "done"]
    assert told == ["short"]
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_the_queue_has_every_run_of_every_study_once() -> None:
    planned = planned_runs()
    names = [own.experiment.folder for own in planned]
    assert len(set(names)) == len(names)
    controls = {run.folder for run in study("table-accuracy", Part()).experiments if run.method == "magnitude"}
    for name in study_names():
        wanted = {run.folder for run in study(name, Part()).experiments}
        assert wanted - controls <= set(names), name
    first = [own for own in planned if own.section == "cifar10-resnet20"]
    assert planned[: len(first)] == first
    assert {own.request for own in first} == {EVERYTHING}
    assert [own.experiment.seed for own in first] == [0] * 9 + [1] * 9 + [2] * 9
    assert all(0 < own.minutes < 600 for own in planned)


def test_the_list_in_the_repository_is_that_of_the_code() -> None:
    listed = yaml.safe_load((ROOT / "results" / "queue.yaml").read_text(encoding="utf-8"))
    planned = planned_runs()
    assert [row["run"] for row in listed["runs"]] == [own.name for own in planned]
    done = {row["run"] for row in listed["runs"] if row.get("done")}
    assert done == {own.name for own in planned if is_finished(own, ROOT / "results")}


@pytest.mark.parametrize("planned", [own for own in planned_runs() if (ROOT / "results" / own.name).exists()])
def test_recorded_runs_are_what_the_queue_asks_for(planned) -> None:
    folder = ROOT / "results" / planned.name
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config == json.loads(json.dumps(planned.experiment.config()))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert {"device", "versions", "date", "precision", "seconds"} <= result.keys()
    assert {path.name for path in folder.iterdir()} <= {*KEPT, "matrix.json"}


def test_the_queue_runs_what_is_missing_and_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--method", "single", "naive", "--out", str(tmp_path)]
    options += ["--backend", "sequential", "--device", "cpu", "--quiet", "--minutes", "9"]
    assert main(["reproduce", "queue", *options]) == 0
    assert "2 runs finished, 0 left" in capsys.readouterr().out
    rows = yaml.safe_load((tmp_path / "queue.yaml").read_text())["runs"]
    assert len(rows) == 4
    assert [row["run"].partition("/")[0] for row in rows if row.get("done")] == ["digits-lenet5", "split-digits"]
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()  # they stay on the machine that trained them
    assert main(["reproduce", "queue", *options]) == 0
    assert "0 runs finished, 0 left" in capsys.readouterr().out


def test_nothing_is_started_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "queue", "--minutes", "0.01", *options]) == 0
    assert "0 runs finished, 4 left" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["queue.yaml"]


def test_options_that_would_change_the_queues_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "queue", "--epochs", "3"]) != 0
    assert "leave out --epochs" in capsys.readouterr().err
    assert main(["reproduce", "table-ece", "--minutes", "3"]) != 0
    assert "--minutes is for the queue" in capsys.readouterr().err


def test_training_on_all_images(tmp_path: Path) -> None:
    held_out, everything = (read_data("digits", None, 0, validation=own) for own in (True, False))
    assert held_out.validation is not None
    assert len(everything.train) == len(held_out.train) + len(held_out.validation)
    assert everything.validation is None
    assert len(everything.train.index.unique()) == len(everything.train)  # type: ignore[attr-defined]
    one = Experiment("digits", "lenet5", "single", changes={"epochs": 1}, validation=False)
    other = Experiment("digits", "lenet5", "single", changes={"epochs": 1})
    assert one.folder != other.folder
    assert "validation" not in other.config()
    done, _ = train_experiment(one, tmp_path / "run", device="cpu", quiet=True)
    assert done["figures"]["cls/accuracy"] > 0.1
    assert ABSOLUTE_CHECK.config()["validation"] is False


def test_wide_resnet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        network = zoo.wrn28_10()
    assert sum(own.numel() for own in network.parameters()) == 36_479_194
    small = zoo.wrn28_10(num_classes=7, width=1)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
