"""sens reproduce queue: every run of the studies once, in order; finished runs are not repeated."""

import json
import subprocess
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
from structured_ensembles.continual import LEARNERS
from structured_ensembles.evaluation.corruptions import STANDARD
from structured_ensembles.methods import METHODS
from structured_ensembles.paper.catalogue import study, study_names
from structured_ensembles.paper.queue import KEPT, Progress, is_finished, run_queue, write_queue
from structured_ensembles.paper.sections import ABSOLUTE_CHECK, Run, plan_runs
from structured_ensembles.paper.studies import EVERYTHING, StudyOptions
from structured_ensembles.report.docs.differences import list_runs_of_row
from structured_ensembles.report.docs.topics import CENTRES
from structured_ensembles.runs.evaluations import evaluation_path
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.grid import Job, run_grid
from structured_ensembles.runs.ingredients import read_data
from structured_ensembles.runs.settings import Defaults, read_defaults
from structured_ensembles.runs.workers import BACKENDS, Pool
from structured_ensembles.storage.run_files import write_json
from structured_ensembles.training import Recipe
from structured_ensembles.zoo.by_name import find_function
from tests.support.paths import ROOT


def test_grid_starts_only_jobs_that_fit_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    left_by: list[type[BaseException] | None] = []

    @contextmanager
    def endless(workers: int | None, jobs: int) -> Iterator[Pool]:
        """Yield two workers whose first job never ends; leaving the pool by an exception stops them."""

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
    reported = []
    outcomes = run_grid(jobs, quiet=True, time_limit=0.5, on_outcome=lambda outcome: reported.append(outcome.name))
    assert [outcome.state for outcome in outcomes] == ["left", "left", "done"]
    assert (reported, outcomes[2].result) == (["short"], {"a": 1})
    assert left_by[0] is not None


def test_queue_has_every_run_of_every_study_once() -> None:
    planned = plan_runs()
    names = [run.experiment.folder for run in planned]
    assert len(set(names)) == len(names)
    controls = {run.folder for run in study("table-accuracy", StudyOptions()).experiments if run.method == "magnitude"}
    for name in study_names():
        wanted = {run.folder for run in study(name, StudyOptions()).experiments}
        assert wanted - controls <= set(names), name
    first = [run for run in planned if run.section == "cifar10-resnet20"]
    assert planned[: len(first)] == first
    assert {run.request for run in first} == {EVERYTHING}
    assert [run.experiment.seed for run in first] == [0] * 9 + [1] * 9 + [2] * 9
    assert all(0 < run.minutes < 600 for run in planned)


def test_what_targets_compare_comes_before_the_other_points_of_the_front() -> None:
    order = [run.experiment.folder for run in plan_runs()]
    rivals = ("single", "deep ×4", "batch-ensemble ×4", "mc-dropout ×4")
    controls = ("random ×4, 1, coupled", "narrow ×4, 1, coupled")
    first, rest = set(), set()
    for dataset in ("cifar10", "cifar100"):
        front = study("front", StudyOptions(datasets=(dataset,)))
        central = {run.folder for row in (*CENTRES, *rivals, *controls) for run in list_runs_of_row(front, row)}
        learned = study("table-continual", StudyOptions(datasets=(dataset,), methods=("structured",)))
        first |= central | {run.folder for run in learned.experiments}
        rest |= {run.folder for run in front.experiments} - central
    assert (len(first), len(rest)) == (2 * 9 * 3, 2 * 9 * 3)
    assert max(map(order.index, first)) < min(map(order.index, rest))


def describe_without_defaults(run: Run) -> str:
    """Describe an experiment by all that its figures depend on, whatever defaults its arguments repeat."""
    config, methods = run.config(), METHODS if isinstance(run, Experiment) else LEARNERS
    if isinstance(run, Experiment):
        config["changes"] = Recipe.named(run.recipe, **run.changes).to_dict()
        del config["recipe"]
    if run.method == "single":
        config.pop("members", None)  # ignored
    defaults = Defaults({}, read_defaults(find_function("method", run.method, methods)), {})
    return json.dumps(defaults.comparable(config), sort_keys=True, default=str)


def test_queue_trains_no_experiment_twice_under_two_names() -> None:
    names: dict[str, list[str]] = {}
    for planned in plan_runs():
        names.setdefault(describe_without_defaults(planned.experiment), []).append(planned.name)
    assert [same for same in names.values() if len(same) > 1] == []


def test_queue_file_in_the_repository_is_current() -> None:
    listed = yaml.safe_load((ROOT / "results" / "queue.yaml").read_text(encoding="utf-8"))
    planned = plan_runs()
    assert [row["run"] for row in listed["runs"]] == [run.name for run in planned]
    done = {row["run"] for row in listed["runs"] if row.get("done")}
    assert done == {run.name for run in planned if is_finished(run, ROOT / "results")}


RECORDED = [run for run in plan_runs() if (ROOT / "results" / run.name / "result.json").exists()]


def test_recorded_run_folders_hold_small_files_only() -> None:
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    runs = [Path(name) for name in listed.stdout.splitlines() if name.count("/") == 3]
    assert len(runs) >= 3 * len(RECORDED)
    assert {path.name for path in runs} <= set(KEPT)
    assert max((ROOT / path).stat().st_size for path in runs) < 200_000


@pytest.mark.parametrize("planned", RECORDED)
def test_recorded_configurations_equal_the_planned_ones(planned) -> None:
    folder = ROOT / "results" / planned.name
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config == json.loads(json.dumps(planned.experiment.config()))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert {"device", "versions", "date", "precision", "seconds"} <= result.keys()


def test_queue_runs_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_queue_takes_one_section_and_refuses_an_unknown_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "queue", "--minutes", "0.01", "--section", "split-digits", *options]) == 0
    assert "0 runs finished, 1 left" in capsys.readouterr().out
    assert main(["reproduce", "queue", "--section", "splitdigits", *options]) != 0
    assert "--section must be among digits-lenet5, split-digits, not splitdigits" in capsys.readouterr().err
    assert main(["reproduce", "table-ece", "--section", "split-digits", "--smoke"]) != 0
    assert "--section is for the queue" in capsys.readouterr().err


def test_promised_runs_on_a_trained_network_come_first_in_all_seeds() -> None:
    tuned = [run.experiment for run in plan_runs() if run.section == "tuned-wide-resnet20"]
    assert [(run.method, run.members, run.seed) for run in tuned[:9]] == [
        (method, members, seed)
        for seed in (0, 1, 2)
        for method, members in (("single", 1), ("prune-and-tune", 4), ("random", 4))
    ]
    assert len(tuned) == 21


def test_runs_longer_than_the_time_left_are_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "queue", "--minutes", "0.01", *options]) == 0
    assert "0 runs finished, 4 left" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["queue.yaml"]


def test_unavailable_data_set_leaves_its_runs_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, root: Path | None) -> None:
        raise RuntimeError("no internet here")

    monkeypatch.setattr("structured_ensembles.paper.queue.load_data", load)
    progress = run_queue(plan_runs((0,), smoke=True), tmp_path, backend="sequential", quiet=True)
    assert (progress.new, len(progress.left), progress.failed) == ([], 4, {})
    assert progress.without == {"digits": "no internet here"}


def seconds_needed(monkeypatch: pytest.MonkeyPatch, checkpoint_mib: float | None) -> dict[str, float]:
    """Return how many seconds must be left to start each run of the queue, by its name."""
    estimates: dict[str, float] = {}
    monkeypatch.setattr("structured_ensembles.paper.queue.load_data", lambda name, root: None)
    monkeypatch.setattr(
        "structured_ensembles.paper.queue.run_grid",
        lambda jobs, *_, **__: estimates.update({job.name: job.seconds for job in jobs}) or [],
    )
    run_queue(plan_runs((0,)), Path("nowhere"), minutes=25, workers=2, checkpoint_mib=checkpoint_mib)
    return estimates


def test_runs_start_with_little_time_left_where_checkpoints_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(seconds_needed(monkeypatch, None).values()) == {90}


def test_runs_of_large_checkpoints_start_only_if_they_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = seconds_needed(monkeypatch, 20)
    members = {run.experiment.model: run for run in plan_runs((0,)) if run.experiment.method in ("deep", "structured")}
    assert estimates[members["resnet20"].name] == 90
    for model in ("resnet18", "wrn28_10"):
        run = members[model]
        assert estimates[run.name] == pytest.approx(60 * run.minutes * 1.8)  # a second worker takes 0.8 of the time
        assert estimates[run.name] > 90


def test_run_is_finished_with_all_figures_by_both_rules(tmp_path: Path) -> None:
    planned, other, *_ = plan_runs((0,), smoke=True)
    folder = tmp_path / planned.name
    complete = {"size/overhead": 1.0, "adv/fgsm@0.02": 0.5, "adv/fgsm@0.5": 0.1}
    complete |= {f"cor/{name}@{severity}": 0.5 for name in STANDARD for severity in (3, 5)}
    complete |= {f"cor/mean@{severity}": 0.5 for severity in (3, 5)}

    def rows() -> list[dict[str, Any]]:
        write_queue([planned, other], tmp_path)
        listed = yaml.safe_load((tmp_path / "queue.yaml").read_text(encoding="utf-8"))
        hours = sum(row["minutes"] for row in listed["runs"] if "done" not in row) / 60
        left = sum("done" not in row for row in listed["runs"])
        assert listed["total"] == {"runs": 2, "left": left, "hours_left": round(hours, 1)}
        return listed["runs"]

    result = {"figures": {}, "seconds": 90.0, "date": "2026-11-16", "device": "CPU", "versions": {}}
    write_json(folder / "result.json", result)
    write_json(evaluation_path(folder, "mean"), {"figures": complete})
    assert not is_finished(planned, tmp_path)  # trained, but measured by one rule only
    for missing in complete:
        figures = {name: value for name, value in complete.items() if name != missing}
        write_json(evaluation_path(folder, "logits"), {"figures": figures})
        assert not is_finished(planned, tmp_path), missing
    assert rows()[0] == {"run": planned.name, "minutes": round(planned.minutes, 1)}
    write_json(evaluation_path(folder, "logits"), {"figures": complete})
    assert is_finished(planned, tmp_path)
    assert rows()[0] == {"run": planned.name, "minutes": 1.5, "done": True}


def test_options_that_change_the_queues_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "queue", "--epochs", "3"]) != 0
    assert "leave out --epochs" in capsys.readouterr().err
    assert main(["reproduce", "table-ece", "--minutes", "3"]) != 0
    assert "--minutes is for the queue" in capsys.readouterr().err


def test_validation_false_trains_on_all_samples(tmp_path: Path) -> None:
    held_out, everything = (read_data("digits", None, 0, validation=validation) for validation in (True, False))
    assert held_out.validation is not None
    assert len(everything.train) == len(held_out.train) + len(held_out.validation)
    assert everything.validation is None
    assert len(everything.train.index.unique()) == len(everything.train)  # type: ignore[attr-defined]
    experiment = Experiment("digits", "lenet5", "single", changes={"epochs": 1}, validation=False)
    other = Experiment("digits", "lenet5", "single", changes={"epochs": 1})
    assert experiment.folder != other.folder
    assert "validation" not in other.config()
    done, _ = train_experiment(experiment, tmp_path / "run", device="cpu", quiet=True)
    assert done["figures"]["cls/accuracy"] > 0.1
    assert ABSOLUTE_CHECK.config()["validation"] is False


def test_wide_resnet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        network = zoo.wrn28_10()
    assert sum(parameter.numel() for parameter in network.parameters()) == 36_479_194
    small = zoo.wrn28_10(num_classes=7, width=1)
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_restricted_passes_do_not_shorten_the_queue_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "structured_ensembles.cli.reproduce.run_queue", lambda planned, out, **_: Progress([], [], {}, {})
    )
    assert main(["reproduce", "queue", "--seeds", "0", "--method", "single"]) == 0
    listed = yaml.safe_load(Path("results/queue.yaml").read_text(encoding="utf-8"))["runs"]
    assert len(listed) == len(plan_runs())
    assert main(["reproduce", "queue", "--smoke"]) == 0
    assert yaml.safe_load(Path("results/queue.yaml").read_text(encoding="utf-8"))["runs"] == listed
    assert "see runs/reproduce/smoke/queue.yaml" in capsys.readouterr().out


def test_the_queue_file_knows_finished_runs_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is committed together with the finished runs."""

    def interrupted(*_: Any, **__: Any) -> Progress:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("structured_ensembles.cli.reproduce.run_queue", interrupted)
    assert main(["reproduce", "queue"]) == 130
    assert len(yaml.safe_load(Path("results/queue.yaml").read_text(encoding="utf-8"))["runs"]) == len(plan_runs())
    assert "the same command resumes" in capsys.readouterr().err
