"""sens report results --docs: the page, the README's tables and the figures equal the recorded runs."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from structured_ensembles.cli.main import main
from structured_ensembles.continual.experiment import ContinualExperiment
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.sections import ABSOLUTE_CHECK, Planned, plan_runs
from structured_ensembles.paper.studies import StudyOptions
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.report.docs.choice import choice_table, list_comparisons
from structured_ensembles.report.docs.differences import list_runs_of_row, subtract_rows
from structured_ensembles.report.docs.gains import gains_table, list_ensembles
from structured_ensembles.report.docs.pictures import draw_front_of_study, draw_pruning
from structured_ensembles.report.docs.records import Records, format_provenance, read_records
from structured_ensembles.report.docs.targets import Target, list_targets, targets_summary, targets_table
from structured_ensembles.report.docs.topics import list_topics, render_topic
from structured_ensembles.report.docs.wall_time import (
    Step,
    count_steps_per_epoch,
    describe_step,
    read_steps,
    wall_time_table,
)
from structured_ensembles.report.docs.write import BLOCK, README, fill_blocks, render_docs
from structured_ensembles.report.figures import as_svg
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import Finished
from structured_ensembles.training.history import COLUMNS
from tests.support.paths import ROOT

MAIN = StudyOptions(datasets=("cifar10",), models=("resnet20",))
PLANNED = plan_runs()
H200 = {
    "seconds": 100.0,
    "epochs": 200,
    "device": "NVIDIA H200",
    "precision": "bfloat16",
    "engine": "graph",
    "date": "2026-11-16T12:00:00+00:00",
    "versions": {"structured-ensembles": "0.1.0", "source": "0123456789ab", "torch": "2.11", "python": "3.12"},
}


def finished(experiment: Any, folder: Path = Path(), **figures: float) -> Finished:
    """Make a finished run with some figures, equal by both rules; two underscores stand for a slash."""
    known = {name.replace("__", "/"): value for name, value in figures.items()}
    return Finished(folder / experiment.folder, experiment.config(), H200, known, known)


def records_of(*runs: tuple[Any, dict[str, float]]) -> Records:
    return Records(PLANNED, {experiment.folder: finished(experiment, **figures) for experiment, figures in runs})


def seeds_of(
    name: str, row: str, values: list[float], figure: str, options: StudyOptions = MAIN
) -> list[tuple[Any, Any]]:
    """Make runs of one row of a study, one for each value."""
    runs = list_runs_of_row(study(name, options), row)
    return [(experiment, {figure: value}) for experiment, value in zip(runs, values, strict=False)]


def test_generated_docs_equal_the_recorded_runs() -> None:
    docs = render_docs(ROOT / "results", ROOT)
    hint = "run `sens report results --docs`"
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == docs.page, hint
    assert (ROOT / README).read_text(encoding="utf-8") == docs.readme, hint
    for name in docs.images:
        assert (ROOT / "docs" / "images" / f"{name}.svg").exists(), hint
    for shown in re.findall(r"images/([\w-]+)\.svg", docs.page):
        assert shown in docs.images


def test_every_readme_table_is_generated() -> None:
    text = (ROOT / README).read_text(encoding="utf-8")
    assert not re.findall(r"^\|[ -]*---", BLOCK.sub("", text), re.MULTILINE)
    assert {match["name"] for match in BLOCK.finditer(text)} == {"gains", "table-accuracy", "targets", "front"}


def test_results_page_has_every_planned_run() -> None:
    known = list_topics()
    shown = {run.folder for topic in known.values() for wanted in topic.studies for run in wanted.experiments}
    assert {run.experiment.folder for run in PLANNED} - shown == {ABSOLUTE_CHECK.folder}  # a target, not a table
    template = files("structured_ensembles.report.docs").joinpath("results.md.jinja").read_text(encoding="utf-8")
    assert sorted(re.findall(r'\{\{ topic\("(.+?)"\) \}\}', template)) == sorted(known)


def test_topic_without_runs_is_one_line() -> None:
    known = list_topics()
    planned = [run for run in PLANNED if run.section == "front-cifar100"]
    hours = sum(run.minutes for run in planned) / 60
    assert render_topic(known["front-cifar100"], records_of()) == f"Not run yet (51 runs, about {hours:.1f} GPU hours)."
    assert "9 runs" in render_topic(known["wrn28-10-cifar10"], records_of())  # of 18 for both data sets
    assert render_topic(known["pruning"], records_of()).startswith("Not run yet (30 runs")
    assert "Not run yet" not in render_topic(known["continual-memory"], records_of())  # counted


def test_run_is_shown_in_every_table_that_needs_it() -> None:
    known = list_topics()
    half = seeds_of("table-accuracy", "structured, layer", [0.905], "cls__accuracy")
    for topic, row in (("pruning", "0.5, layer"), ("initialization", "N(0,1), layer")):
        assert f"| {row} | 90.50" in render_topic(known[topic], records_of(*half))
    learner = ContinualExperiment("cifar10", "half-vgg11", "structured")
    tasks = records_of((learner, {"cl__accuracy": 0.8}))
    rows = {"split-cifar10": "structured", "continual-ablation": "layer-hard", "continual-pruning": "0.5"}
    for topic, row in rows.items():
        assert f"| {row} | 80.00" in render_topic(known[topic], tasks)


def test_table_shows_seeds_and_missing_runs() -> None:
    runs = seeds_of("table-accuracy", "single", [0.89, 0.91], "cls__accuracy")
    runs += seeds_of("table-accuracy", "structured, layer", [0.905], "cls__accuracy")
    text = render_topic(list_topics()["table-accuracy"], records_of(*runs))
    assert "| accuracy (%) | mean of probabilities | paper's rule | seeds |" in text
    assert "| single | 90.00 ± 1.41 (88.67) | 90.00 ± 1.41 (88.67) | 2 |" in text
    assert "| structured, layer | 90.50 (90.95¹) | 90.50 (90.95¹) | 1 |" in text
    assert "| deep | not run (92.35) | not run (92.35) | 0 |" in text
    assert "| structured, layer − single | +1.50 (+1.50) | one seed: no error known |" in text
    assert "| structured, layer − deep | not run | 0 |" in text
    assert "3 runs: version 0.1.0, source 0123456789ab; torch 2.11; NVIDIA H200; bfloat16; 2026-11-16." in text


def test_published_rows_without_runs_have_no_seeds() -> None:
    single = next(run.experiment for run in PLANNED if run.section == "wrn28-10" and run.experiment.method == "single")
    text = render_topic(list_topics()["wrn28-10-cifar10"], records_of((single, {"cls__accuracy": 0.95})))
    (line,) = {line for line in text.splitlines() if line.startswith("| MIMO |")}
    assert "(96.40)" in line
    assert "not run" not in line
    assert line.endswith("|  |")


def test_differences_are_paired_over_common_seeds() -> None:
    runs = seeds_of("table-accuracy", "structured, layer", [0.905, 0.911, 0.912], "cls__accuracy")
    runs += seeds_of("table-accuracy", "random", [0.900, 0.910, 0.915], "cls__accuracy")
    wanted = study("table-accuracy", MAIN)
    pair = ("structured, layer", "random")
    difference = subtract_rows(records_of(*runs), wanted, pair, "cls/accuracy", "mean")
    assert difference is not None
    assert difference.values == pytest.approx((0.005, 0.001, -0.003))
    assert difference.mean == pytest.approx(0.001)
    assert difference.error == pytest.approx(0.004 / math.sqrt(3))
    assert str(difference) == "+0.10 ± 0.23 points"
    fewer = subtract_rows(records_of(*runs[1:4]), wanted, pair, "cls/accuracy", "mean")  # seeds 1, 2 and 0
    assert fewer is None
    overlapping = subtract_rows(records_of(*runs[1:5]), wanted, pair, "cls/accuracy", "mean")  # 1, 2 and 0, 1
    assert overlapping is not None
    assert overlapping.values == pytest.approx((0.001,))
    assert overlapping.error is None
    diverged = seeds_of("table-accuracy", "single", [math.nan, 0.9], "cls__accuracy")
    lost = subtract_rows(records_of(*runs, *diverged), wanted, ("structured, layer", "single"), "cls/accuracy", "mean")
    assert lost is not None
    assert str(lost) == "+nan points"


def test_provenance_lists_versions_devices_and_dates() -> None:
    (first_experiment, _), (second_experiment, _) = seeds_of("table-accuracy", "single", [0.9, 0.9], "cls__accuracy")
    first, second = finished(first_experiment), finished(second_experiment)
    later = {**H200, "date": "2026-11-18", "device": "NVIDIA L4", "precision": "float32"}
    later["versions"] = {**H200["versions"], "source": "ffff"}  # type: ignore[dict-item]
    text = format_provenance([first, Finished(second.folder, second.config, later, {})])
    assert "0.1.0, source 0123456789ab (1) / 0.1.0, source ffff (1)" in text
    assert "NVIDIA H200 (1) / NVIDIA L4 (1); bfloat16 (1) / float32 (1); 2026-11-16 to 2026-11-18." in text


@pytest.mark.parametrize(
    ("structured", "single", "verdicts"),
    [
        ([0.9095] * 3, [0.8915] * 3, ["met", "met"]),
        ([0.9094] * 3, [0.8915] * 3, ["**not met**", "**not met**"]),
        ([0.92], [0.90], ["met so far", "met so far"]),
        ([0.90], [], ["**not met** so far", "not run"]),
    ],
)
def test_targets_of_the_main_table_are_judged_from_runs(
    structured: list[float], single: list[float], verdicts: list[str]
) -> None:
    runs = seeds_of("table-accuracy", "structured, layer", structured, "cls__accuracy")
    runs += seeds_of("table-accuracy", "single", single, "cls__accuracy")
    judged = [target for target in list_targets(records_of(*runs)) if "structured, layer" in target.group]
    assert [target.line[-1] for target in judged] == [*verdicts, "not run"]
    assert judged[0].line[2] == f"{len(structured)} of 3"


def front_run(row: str, accuracy: float, nll: float, ece: float, memory: float = 1.0, **more: float) -> Any:
    experiment = list_runs_of_row(study("front", StudyOptions(datasets=("cifar10",))), row)[0]
    quality = {"cal__nll": nll, "cal__nll_t": nll, "cal__ece15": ece, "cal__ece15_t": ece, "cls__accuracy": accuracy}
    return experiment, {**quality, "size__overhead": memory, "size__members": float(experiment.members), **more}


def test_targets_of_the_front_are_judged_from_runs() -> None:
    runs = [
        front_run("single", 0.940, 0.20, 0.030),
        front_run("structured ×4, 1, coupled", 0.943, 0.17, 0.010, cal__ece15_t=0.016, cal__nll_t=0.169),
        front_run("batch-ensemble ×4", 0.941, 0.18, 0.020),
        front_run("mc-dropout ×4", 0.944, 0.18, 0.020),  # more accurate: not beaten
    ]
    group = "Front, CIFAR-10, four members in the memory of one, coupled"
    judged = {target.text: target for target in list_targets(records_of(*runs)) if target.group == group}
    met = {text: target.met for text, target in judged.items()}
    assert met == {
        "accuracy at least 0.3 points above single": True,
        "NLL at least 15 % below single": True,
        "NLL after temperature at least 15 % below single": True,
        "ECE, 15 bins at least 50 % below single": True,
        "ECE after temperature, 15 bins at least 50 % below single": False,
        "better than batch-ensemble ×4 in accuracy, NLL and ECE": True,
        "better than mc-dropout ×4 in accuracy, NLL and ECE": False,
    }
    assert judged["ECE after temperature, 15 bins at least 50 % below single"].figure == "−46.7 %"


def test_targets_of_tuned_members_are_judged_from_runs() -> None:
    def run(row: str, accuracy: float, nll: float, ece: float) -> Any:
        return list_runs_of_row(tuned_study(), row)[0], {"cls__accuracy": accuracy, "cal__nll": nll, "cal__ece15": ece}

    runs = [
        run("single, 40 epochs", 0.940, 0.20, 0.030),
        run("prune-and-tune ×4, 30 + 10 epochs", 0.940, 0.171, 0.010),
        run("random ×4, 40 epochs", 0.950, 0.15, 0.010),  # another row
    ]
    judged = {target.text: target for target in list_targets(records_of(*runs)) if "tuned out of" in target.group}
    assert {text: target.met for text, target in judged.items()} == {
        "accuracy at least that of single, 40 epochs": True,
        "NLL at least 15 % below single, 40 epochs": False,
        "ECE, 15 bins ≤ 1.00 %": True,
    }
    assert judged["NLL at least 15 % below single, 40 epochs"].figure == "−14.5 %"


def test_ratio_of_a_target_is_of_the_seeds_that_both_rows_have() -> None:
    first, second = (
        list_runs_of_row(tuned_study(), row) for row in ("prune-and-tune ×4, 30 + 10 epochs", "single, 40 epochs")
    )
    runs = [(first[0], {"cal__nll": 0.16}), (first[1], {"cal__nll": 0.18})]
    runs += [(run, {"cal__nll": nll}) for run, nll in zip(second, (0.2, 0.2, 9.0), strict=True)]
    (target,) = (
        one for one in list_targets(records_of(*runs)) if one.text == "NLL at least 15 % below single, 40 epochs"
    )
    assert (target.figure, target.seeds, target.met) == ("−15.0 %", 2, True)


@pytest.mark.parametrize(("accuracy", "met"), [(0.9530, True), (0.9529, False)])
def test_target_of_one_network_is_its_usual_accuracy(accuracy: float, met: bool) -> None:
    records = records_of((ABSOLUTE_CHECK, {"cls__accuracy": accuracy}))
    (target,) = (one for one in list_targets(records) if one.group.startswith("ResNet18 alone"))
    assert (target.met, target.planned_seeds) == (met, 1)


def test_targets_without_runs_take_at_most_one_line() -> None:
    runs = seeds_of("table-continual", "structured", [0.93, 0.92], "cl__accuracy", StudyOptions(datasets=("cifar10",)))
    judged = list_targets(records_of(*runs))
    table = targets_table(judged).splitlines()
    assert "| Split-CIFAR-10: accuracy ≥ 92.27 % | 92.50 ± 0.50 % | 2 of 3 | met so far |" in table  # ± 0.71 / √2
    assert sum("Front, CIFAR-100" in line for line in table) == 2
    total = len(judged)
    assert targets_summary(judged).splitlines() == [
        "- **Met**: Split-CIFAR-10 (1 of 1 target, 2 of 3 seeds).",
        "- **Not met**: none so far.",
        f"- **Not run**: {total - 1} of {total} targets.",
    ]
    none_run = list_targets(records_of())
    assert targets_summary(none_run).splitlines()[0] == "- **Met**: none yet."
    assert targets_summary(none_run).splitlines()[2] == f"- **Not run**: {total} of {total} targets."
    some = [Target("group", "a", "1 %", 3, met=True), Target("group", "b", "2 %", 1, met=False), Target("other", "c")]
    assert targets_summary(some).splitlines() == [
        "- **Met**: group (1 of 2 targets, 3 of 3 seeds).",
        "- **Not met**: group: b (2 %).",
        "- **Not run**: 1 of 3 targets.",
    ]


def test_front_figure_has_whole_ensembles_only() -> None:
    wanted = study("front", StudyOptions(datasets=("cifar10",)))
    runs = [
        front_run("single", 0.940, 0.20, 0.030),
        front_run("deep ×2", 0.945, 0.18, 0.020, 2.0, **{"first__1__accuracy": 0.9}),
        front_run("deep ×4", 0.948, 0.16, 0.010, 4.0),
        front_run("structured ×4, 0.5", 0.935, 0.19, 0.011, 0.5, cal__ece15_t=0.005),
        front_run("structured ×4, 2", 0.944, 0.17, 0.010, 2.0),
    ]
    assert draw_front_of_study(records_of(*runs[:1]), wanted) is None
    figure = draw_front_of_study(records_of(*runs), wanted)
    assert figure is not None
    points = {  # what matplotlib drew, by the label of the line
        container.get_label(): [(float(x), round(float(y), 6)) for x, y in container.lines[0].get_xydata()]
        for container in figure.axes[0].containers
    }
    assert points == {
        "single": [(1.0, 94.0)],
        "deep": [(2.0, 94.5), (4.0, 94.8)],
        "structured ×4": [(0.5, 93.5), (2.0, 94.4)],
    }
    after = draw_front_of_study(records_of(*runs), wanted, temperature=True)
    assert after is not None
    assert after.axes[2].containers[-1].lines[0].get_ydata()[0] == pytest.approx(0.5)
    again = draw_front_of_study(records_of(*runs), wanted)
    assert again is not None
    assert as_svg(figure) == as_svg(again)


def test_continual_pruning_figure_has_the_shares_that_were_run() -> None:
    wanted = study("figure-continual-pruning", StudyOptions())
    runs = [(list_runs_of_row(wanted, row)[0], {"cl__accuracy": value}) for row, value in (("0.1", 0.9), ("0.5", 0.92))]
    assert draw_pruning(records_of(*runs[:1]), wanted) is None
    figure = draw_pruning(records_of(*runs), wanted)
    assert figure is not None
    assert figure.axes[0].containers[0].lines[0].get_xdata() == pytest.approx([10, 50])


# Wall time ------------------------------------------------------------------------------------------------------------


def write_record(folder: Path, name: str, rows: list[dict[str, Any]], batch: int = 128) -> None:
    settings = {"batch": batch, "prune": 0.5}
    text = json.dumps({"settings": settings, "device": "NVIDIA H200", "rows": rows})
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def test_eager_time_is_steps_times_epochs_of_all_networks(tmp_path: Path) -> None:
    deep = Experiment("cifar10", "resnet20", "deep", recipe="paper")
    (tmp_path / deep.folder).mkdir()
    (tmp_path / deep.folder / "history.csv").write_text(
        "\n".join([",".join(COLUMNS), *(f"{row},0.1,1,1,0.5,2" for row in ("0,0", "0,1", "1,0"))])  # one stopped early
    )
    learner = ContinualExperiment("cifar10", "half-vgg11", "naive")
    done = {experiment.folder: finished(experiment, tmp_path) for experiment in (deep, learner)}
    records = Records([Planned("a", deep), Planned("b", learner)], done)
    steps = {("NVIDIA H200", Step("resnet20", 1, 32, "full")): 100.0}
    first, second = wall_time_table(records, steps).splitlines()[2:]
    # 45,000 images are 352 batches of 128; three epochs of them at 0.1 s a step
    assert first == f"| `{deep.folder}` | 100 | 200 | 3 | graph | 100.0 | 106 | 1.1 |"
    assert second.endswith("| not measured | – | – |")
    # Of 1,000 samples, the last of eight batches is not full; all 50,000 images are 391
    assert count_steps_per_epoch(replace(deep, limit=1000)) == 8
    assert count_steps_per_epoch(replace(deep, validation=False)) == 391
    other = {("NVIDIA L4", Step("resnet20", 1, 32, "full")): 100.0}
    assert "not measured" in wall_time_table(records, other).splitlines()[2]


def test_whole_networks_that_are_trained_first_count_with_their_own_eager_step(tmp_path: Path) -> None:
    """Of prune-and-tune the base, of taught members their teachers: numbers from the members' on."""
    tuned = Experiment("cifar10", "resnet20", "prune-and-tune", members=2, method_arguments={"prune": 0.5})
    (tmp_path / tuned.folder).mkdir()
    rows = ["0,2", "1,2", "2,2", "3,0", "3,1"]  # three epochs of the base, one of both members
    (tmp_path / tuned.folder / "history.csv").write_text(
        "\n".join([",".join(COLUMNS), *(f"{row},0.1,1,1,0.5,2" for row in rows)])
    )
    records = Records([Planned("a", tuned)], {tuned.folder: finished(tuned, tmp_path)})
    steps = {("NVIDIA H200", Step("resnet20", 1, 32, kind)): ms for kind, ms in (("full", 100.0), ("prune=0.5", 50.0))}
    line = wall_time_table(records, steps).splitlines()[2]
    # 352 steps an epoch: 3 · 35.2 s and 2 · 17.6 s
    assert line == f"| `{tuned.folder}` | 100 | 200 | 5 | graph | 100.0, then 50.0 | 141 | 1.4 |"
    del steps["NVIDIA H200", Step("resnet20", 1, 32, "full")]
    assert wall_time_table(records, steps).splitlines()[2].endswith("| 5 | graph | not measured | – | – |")


def test_fastest_recorded_eager_step_counts_and_own_measurements_come_first(tmp_path: Path) -> None:
    fleet = [
        {"model": "resnet20", "members": 5, "name": "one full network, eager", "ms": 8.0},
        {"model": "resnet20", "members": 5, "name": "eager loop", "ms": 45.0},
        {"model": "resnet20", "members": 5, "name": "eager loop, bfloat16", "ms": 40.0},
        {"model": "resnet20", "members": 5, "name": "ours, graph", "ms": 1.0},
        {"model": "resnet32", "members": 1, "name": "one full network, eager", "ms": 26.0},
        {"model": "vgg11", "members": 1, "name": "eager loop", "ms": None},
    ]
    write_record(tmp_path, "fleet-h200", fleet)
    device = "NVIDIA H200"
    full, half = (Step("resnet20", 1, 32, kind) for kind in ("full", "prune=0.5"))
    wide = Step("resnet32", 1, 64, "full")
    assert read_steps(tmp_path) == {(device, full): 8.0, (device, half): 8.0, (device, wide): 26.0}
    rows = [{**vars(full), "precision": precision, "ms": ms} for precision, ms in (("float32", 8.5), ("bfloat16", 9.0))]
    write_record(tmp_path, "eager-h200", rows)
    write_record(tmp_path, "eager-trial", [{**vars(wide), "ms": 0.1}], batch=8)
    assert read_steps(tmp_path) == {(device, full): 8.5, (device, half): 8.0, (device, wide): 26.0}


def test_step_of_names_the_kind_of_training_step() -> None:
    def kind(method: str, members: int = 5, **arguments: Any) -> str:
        step = describe_step(Experiment("cifar10", "resnet20", method, members=members, method_arguments=arguments))
        assert step is not None
        return step.kind

    assert {kind("single", 1), kind("deep"), kind("snapshot", cycle=50)} == {"full"}
    assert kind("structured", prune=0.5, scope="network") == kind("random", prune=0.5) == "prune=0.5"
    assert kind("narrow", 4, memory=1.0, coupled=True) == "memory=1 of 4, coupled"
    assert kind("structured", 4, memory=0.5) == "memory=0.5 of 4"
    assert (kind("batch-ensemble", 4), kind("mc-dropout")) == ("batch-ensemble ×4", "mc-dropout")


def test_eager_benchmark_covers_the_steps_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import torch

    import eager

    steps = eager.find_steps()
    assert {describe_step(run.experiment) for run in PLANNED} - {None} == set(steps)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    sizes = {}
    for kind in ("full", "prune=0.5", "batch-ensemble ×5", "mc-dropout"):
        network = eager.build_network(steps[Step("resnet20", 1, 32, kind)])
        before = [parameter.detach().clone() for parameter in network.parameters()]
        eager.training_step(network.train(), images, labels, halved=False)()
        assert any(not torch.equal(new, old) for new, old in zip(network.parameters(), before, strict=True))
        sizes[kind] = sum(parameter.numel() for parameter in network.parameters())
    assert sizes["prune=0.5"] < 0.55 * sizes["full"] == 0.55 * sizes["mc-dropout"] < sizes["batch-ensemble ×5"]
    sys.modules.pop("eager")


def test_eager_benchmark_measures_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import eager

    full, half = (Step("resnet20", 1, 32, kind) for kind in ("full", "prune=0.5"))
    runs = {step: eager.find_steps()[step] for step in (full, half)}
    monkeypatch.setattr(eager, "find_steps", lambda: runs)
    path = tmp_path / "eager-trial.json"
    options = ["eager.py", "--device", "cpu", "--batch", "2", "--steps", "1", "--precisions", "float32", "--missing"]

    def kinds(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [*options, "--json", str(path), *more])
        eager.main()
        return [row["kind"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]

    monkeypatch.setattr(eager, "list_known_steps", lambda *_: {half})  # as if benchmarks/results had it
    assert kinds() == ["full"]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(eager, "find_steps", lambda: runs)
    monkeypatch.setattr(eager, "read_steps", lambda folder: {})
    assert kinds("--minutes", "0") == ["full"]
    assert "1 step left" in capsys.readouterr().out
    first = json.loads(path.read_text(encoding="utf-8"))["rows"][0]
    assert kinds() == ["full", "prune=0.5"]
    assert json.loads(path.read_text(encoding="utf-8"))["rows"][0] == first  # not measured again
    assert kinds("--precisions", "float32", "bfloat16") == ["full", "prune=0.5", "full", "prune=0.5"]
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["precision"] for row in rows] == ["float32", "float32", "bfloat16", "bfloat16"]
    with pytest.raises(ValueError, match="give another file"):
        kinds("--batch", "4")
    sys.modules.pop("eager")


# Writing --------------------------------------------------------------------------------------------------------------


def test_filled_replaces_only_the_text_between_marks() -> None:
    text = "a\n<!-- results: one -->\nold 1\n<!-- end -->\nb\n<!-- results: two -->\n<!-- end -->\nc\n"
    new = fill_blocks(text, {"one": "| 1 |", "two": "2", "three": "3"})
    assert new == (
        "a\n<!-- results: one -->\n\n| 1 |\n\n<!-- end -->\nb\n<!-- results: two -->\n\n2\n\n<!-- end -->\nc\n"
    )
    assert fill_blocks(new, {"one": "| 1 |", "two": "2"}) == new
    with pytest.raises(ValueError, match="no results named two"):
        fill_blocks(text, {"one": ""})
    with pytest.raises(ValueError, match="closed by"):
        fill_blocks("<!-- results: one -->\n| 1 |\n", {"one": ""})


def test_report_docs_repairs_edited_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    text = (ROOT / README).read_text(encoding="utf-8")
    line = next(row for row in text.splitlines() if row.startswith("| structured, layer |"))
    (tmp_path / README).write_text(text.replace(line, "| structured, layer | 99.99 |"), encoding="utf-8")
    assert main(["report", str(tmp_path / "results"), "--docs"]) == 0
    assert "docs/results.md" in capsys.readouterr().out
    assert (tmp_path / README).read_text(encoding="utf-8") == text
    assert (tmp_path / "docs" / "results.md").read_bytes() == (ROOT / "docs" / "results.md").read_bytes()


def test_report_docs_needs_the_results_folder_of_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--docs"]) != 0
    assert "--docs takes one folder" in capsys.readouterr().err
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "queue.yaml").write_text("")
    assert main(["report", str(tmp_path / "results"), "--docs"]) != 0
    assert "has no README.md" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


def test_choice_shows_memory_differences_and_seeds() -> None:
    runs = list_runs_of_row(tuned_study(), "random ×2, 40 epochs")[:2]
    alone = list_runs_of_row(tuned_study(), "single, 40 epochs")[:2]
    records = records_of(
        *((run, {"cls__accuracy": 0.94 + 0.01 * run.seed, "size__overhead": 1.04}) for run in runs),
        *((run, {"cls__accuracy": 0.93, "size__overhead": 1.0}) for run in alone),
    )
    (line,) = (line for line in choice_table(records).splitlines() if "two halves" in line)
    # Differences of 1 and 2 points: their mean is 1.5, its standard error is 0.5.
    missing = " | not run" * 4
    assert line == f"| wide network: two halves − the network | 1.0 against 1.0 | +1.50 ± 0.50{missing} | 2 |"
    assert choice_table(records_of()).splitlines()[2].endswith(f"| not run | not run{missing} | 0 |")


def test_gains_show_mean_and_deviation_of_each_ensemble_or_that_it_was_not_run() -> None:
    runs = list_runs_of_row(tuned_study(), "random ×2, 40 epochs")[:2]
    records = records_of(*((run, {"cls__accuracy": 0.94 + 0.01 * run.seed, "size__overhead": 1.04}) for run in runs))
    lines = {line.split(" | ")[0]: line for line in gains_table(records).splitlines()}
    missing = " | not run" * 4
    assert lines["| two halves in its memory"] == f"| two halves in its memory | 1.0 | 94.50 ± 0.71{missing} | 2 |"
    assert lines["| four full networks"] == f"| four full networks | not run | not run{missing} | 0 |"
    assert all(list_runs_of_row(ensemble.study, ensemble.row) for ensemble in list_ensembles())


# Pairs that the README and docs/results.md speak of, with the sign that their words say of each figure of CLAIMED.
CLAIMED = ("cls/accuracy", "cal/nll", "cal/ece15", "cal/nll_t", "cal/ece15_t")
CLAIMS = {
    "ResNet18: four coupled halves − the network": (+1, -1, -1, -1, None),
    "wide network: two halves − the network": (+1, -1, -1, -1, None),
    "wide network: four halves − the network": (+1, -1, -1, -1, None),
    "trained wide network: four halves of it, tuned − the network": (+1, -1, -1, -1, None),
    "trained wide network: four halves of it, tuned − four from scratch": (-1, +1, None, +1, None),
    "ResNet20: five halves − the network": (+1, -1, -1, -1, +1),
    "ResNet20: five halves − five full networks": (-1, +1, None, +1, None),
}


@pytest.mark.parametrize("text", CLAIMS)
def test_words_on_when_to_use_it_follow_from_the_recorded_runs(text: str) -> None:
    """Where this fails, the bullets below the table of choice must change, in README.md and results.md.jinja."""
    records = read_records(ROOT / "results", PLANNED)
    (wanted,) = (comparison for comparison in list_comparisons() if comparison.text == text)
    for figure, sign in zip(CLAIMED, CLAIMS[text], strict=True):
        difference = subtract_rows(records, wanted.study, wanted.pair, figure, "mean")
        assert difference is not None
        assert sign is None or sign * difference.mean > 2 * (difference.error or 0.0)


def test_words_on_calibration_follow_from_the_recorded_runs() -> None:
    """README.md, results.md: with temperatures, the ECE of wide halves is within half a point of the network's."""
    records = read_records(ROOT / "results", PLANNED)
    for comparison in list_comparisons():
        if "wide network" in comparison.text:
            difference = subtract_rows(records, comparison.study, comparison.pair, "cal/ece15_t", "mean")
            assert difference is not None
            assert abs(difference.mean) < 0.005
