"""sens reproduce queue: every run of the studies once, in order; finished runs are not done again."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from structured_ensembles import zoo
from structured_ensembles.cli.main import main
from structured_ensembles.experiment import Experiment, train_experiment
from structured_ensembles.grid import Job, run_grid
from structured_ensembles.ingredients import read_data
from structured_ensembles.paper.catalogue import study, study_names
from structured_ensembles.paper.queue import KEPT, is_finished, run_queue
from structured_ensembles.paper.sections import ABSOLUTE_CHECK, planned_runs
from structured_ensembles.paper.studies import EVERYTHING, Part
from structured_ensembles.workers import BACKENDS, Pool

ROOT = Path(__file__).parent.parent


def test_a_grid_ends_in_time_and_starts_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by: list[type[BaseException] | None] = []

    @contextmanager
    def endless(workers: int | None, jobs: int) -> Iterator[Pool]:
        """Two workers, whose first job never ends; a pool whose context an exception leaves ends its workers."""

        def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if arguments[0] != "long":
                future.set_result(function(*arguments))
            return future

        try:
            yield Pool(submit, 2, remote=False)
        finally:
            left_by.append(sys.exc_info()[0])

    monkeypatch.setitem(BACKENDS, "loky", endless)
    jobs = [
        Job("long", dict, seconds=0.1),  # a wrong estimate
        Job("too long", dict, seconds=1000.0),
        Job("short", dict, {"a": 1}, seconds=0.1),
    ]
    told = []
    outcomes = run_grid(jobs, quiet=True, time_limit=0.5, on_outcome=lambda own: told.append(own.name))
    assert [own.state for own in outcomes] == ["left", "left", "done"]
    assert (told, outcomes[2].result) == (["short"], {"a": 1})
    assert left_by[0] is not None


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
    assert {path.name for path in folder.iterdir()} <= set(KEPT)


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


def test_data_that_cannot_be_had_leaves_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, root: Path | None) -> None:
        raise RuntimeError("no internet here")

    monkeypatch.setattr("structured_ensembles.paper.queue.load_data", load)
    found = run_queue(planned_runs((0,), smoke=True), tmp_path, backend="sequential", quiet=True)
    assert (found.new, len(found.left), found.failed) == ([], 4, {})
    assert found.without == {"digits": "no internet here"}


def test_runs_with_small_checkpoints_begin_whenever_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, float] = {}
    monkeypatch.setattr("structured_ensembles.paper.queue.load_data", lambda name, root: None)
    monkeypatch.setattr(
        "structured_ensembles.paper.queue.run_grid",
        lambda jobs, *_, **__: given.update({job.name: job.seconds for job in jobs}) or [],
    )
    planned = planned_runs((0,))
    run_queue(planned, Path("nowhere"), minutes=25, workers=2)
    needed = {
        own.experiment.model: given[own.name] for own in planned if own.experiment.method in ("deep", "structured")
    }
    assert needed["resnet20"] == 90
    assert 90 < needed["resnet18"] < needed["wrn28_10"]


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
