"""sens reproduce: the runs of each table, shared between tables, done once, beside the paper's figures."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.evaluation import CORRUPTIONS
from structured_ensembles.paper.carry_out import is_complete
from structured_ensembles.paper.catalogue import study, study_names
from structured_ensembles.paper.random_subsets import METHOD
from structured_ensembles.paper.studies import StudyOptions, figure_of
from structured_ensembles.paper.tables import write_study_notes
from structured_ensembles.report import reproduce as reproduce_module
from structured_ensembles.report.page import group_runs
from structured_ensembles.report.pictures import _draw_all, draw_pictures, list_front_points
from structured_ensembles.report.reproduce import name_members
from structured_ensembles.runs.evaluations import read_figures
from structured_ensembles.runs.experiment import Experiment
from structured_ensembles.runs.finished import Finished, read_run
from structured_ensembles.runs.ingredients import read_data
from structured_ensembles.runs.measurement import Request, measure_experiment

SMOKE = StudyOptions(smoke=True)
STRUCTURED = ("structured, layer", "structured, network")


@pytest.mark.parametrize(
    ("name", "seeds"), [("table-accuracy", "seeds 0, 1, 2."), ("defaults", "seeds 0, 1, 2."), ("subsets", "5 seeds.")]
)
def test_notes_name_the_seeds_of_the_runs(name: str, seeds: str) -> None:
    options = StudyOptions()
    assert write_study_notes(study(name, options), options)[0].startswith(
        f"Ours: mean ± standard deviation over {seeds}"
    )


def test_notes_are_in_the_singular_for_one_seed_and_one_epoch() -> None:
    options = StudyOptions(seeds=(2,), epochs=1, limit=1438)
    notes = write_study_notes(study("table-continual", options), options)
    assert notes[0].startswith("Ours: one seed, 2. In brackets")
    assert notes[-1] == "Not the paper's training: recipe paper, 1 epoch, 1,438 training samples."


def test_notes_explain_brackets_only_where_the_paper_printed_something() -> None:
    notes = [write_study_notes(study("table-accuracy", options), options)[0] for options in (StudyOptions(), SMOKE)]
    assert ["In brackets what the paper printed" in note for note in notes] == [True, False]


def test_every_published_cell_has_runs() -> None:
    accuracy = study("table-accuracy", StudyOptions())
    published_rows = {"single", "deep", "snapshot", "batch-ensemble", "mc-dropout", *STRUCTURED}
    assert set(accuracy.paper) == {key for key in accuracy.sources if key[0] in published_rows}
    assert {"random", "magnitude", "narrow"} <= set(accuracy.rows)
    runs, figure = accuracy.sources["structured, layer", "svhn/vgg11"]
    assert figure == "cls/accuracy"
    assert [run.seed for run in runs] == [0, 1, 2]
    assert runs[0].recipe == "paper"
    assert runs[0].changes == {"rate": 0.01, "patience": 5}  # VGG, and SVHN
    assert runs[0].method_arguments == {"prune": 0.5}
    snapshot, _ = accuracy.sources["snapshot", "cifar10/resnet20"]
    assert snapshot[0].method_arguments == {"cycle": 50}
    pruning = study("table-pruning", StudyOptions())
    assert pruning.paper["0.3, layer", "size/overhead"] == pruning.paper["0.3, network", "size/overhead"]
    initial = study("table-initialization", StudyOptions())
    for restricted in (pruning, initial):
        assert {run.method_arguments.get("scope", "layer") for run in restricted.experiments} == {"layer", "network"}
        assert len(restricted.experiments) == 30
        assert restricted.rules == ("mean", "logits")
    # The same setting is one run, whatever table it is in.
    main = accuracy.sources["structured, layer", "cifar10/resnet20"][0]
    assert pruning.sources["0.5, layer", "cal/ece"][0] == initial.sources["N(0,1), layer", "cal/ece"][0] == main


def test_main_tables_have_both_scopes_and_both_rules() -> None:
    for name in ("table-accuracy", "table-ece", "table-diversity", "table-uncertainty"):
        table = study(name, StudyOptions())
        assert table.rules == ("mean", "logits")
        column = next(column for row, column in table.paper if row == "structured, layer")
        layer, network = (table.sources[row, column][0][0].method_arguments for row in STRUCTURED)
        assert {**layer, "scope": "network"} == network == {"prune": 0.5, "scope": "network"}
        assert table.paper[STRUCTURED[0], column] is table.paper[STRUCTURED[1], column]


def test_vgg_tables_include_rescaled_members() -> None:
    table = study("table-accuracy", StudyOptions())
    rescaled = [row for row in table.rows if row.endswith(", rescaled")]
    assert rescaled == [f"{row}, rescaled" for row in (*STRUCTURED, "random", "magnitude")]
    for row in rescaled:
        plain = row.removesuffix(", rescaled")
        columns = {column for label, column in table.sources if label == row}
        assert columns == {column for column in table.columns if "vgg" in column}
        plain_run, rescaled_run = (table.sources[label, "cifar100/vgg11"][0][0] for label in (plain, row))
        assert {**plain_run.method_arguments, "rescale": True} == rescaled_run.method_arguments
    assert not any(row in rescaled for row, _ in table.paper)
    assert not any("rescaled" in row for row in study("table-ece", StudyOptions()).rows)  # of ResNets
    assert any("rescaled" in row for row in study("table-diversity", StudyOptions(models=("vgg11",))).rows)


def test_studies_share_equal_runs() -> None:
    names = ("table-accuracy", "table-ece", "table-diversity", "table-uncertainty", "figure-memory")
    folders = [{run.folder for run in study(name, StudyOptions()).experiments} for name in names]
    assert all(others <= folders[0] for others in folders[1:])


def test_options_restrict_a_study() -> None:
    options = StudyOptions(
        datasets=("cifar10",), models=("resnet20",), methods=("structured",), seeds=(4,), epochs=7, limit=500
    )
    restricted = study("table-accuracy", options)
    assert restricted.rows == STRUCTURED
    run, _ = restricted.experiments
    assert (run.dataset, run.model, run.seed, run.changes["epochs"], run.limit) == ("cifar10", "resnet20", 4, 7, 500)
    elsewhere = study("table-accuracy", StudyOptions(datasets=("mnist",), models=("lenet5",), seeds=(0,)))
    assert elsewhere.columns == ("mnist/lenet5",)
    assert not elsewhere.paper
    with pytest.raises(ValueError, match="name must be one of table-accuracy"):
        study("table-everything", StudyOptions())


def test_table_columns_are_figures_of_evaluate() -> None:
    assert figure_of("fgsm-0.02/cls/accuracy") == "adv/fgsm@0.02"
    assert figure_of("fgsm-0.5/unc/filtered_accuracy") == "adv/fgsm@0.5/filtered_accuracy"
    assert figure_of("corruptions-5/unc/discarded") == "cor/mean@5/discarded"
    assert figure_of("div/cc") == "div/cc"


def test_every_experiment_has_its_own_folder() -> None:
    runs = [run for name in study_names() for run in study(name, StudyOptions()).experiments]
    configs = {json.dumps(run.config(), sort_keys=True) for run in runs}
    assert len({run.folder for run in runs}) == len(configs)
    assert all("/" not in run.folder and len(run.folder) < 200 for run in runs)


def test_request_names_its_missing_figures() -> None:
    request = Request(fgsm=(0.02, 0.5), corruptions=True, severities=(3, 5))
    names = ["mean", "extra_mean", *CORRUPTIONS]
    three, five = ({f"cor/{name}@{severity}": 0.4 for name in names} for severity in (3, 5))
    figures = {"adv/fgsm@0.02": 0.5, **three}
    assert request.missing(figures) == Request((0.5,), True, (5,))
    assert request.missing({**figures, "adv/fgsm@0.5": 0.1, **five}) == Request((), False, ())
    some = {"adv/fgsm@0.5": 0.1, "cor/fog@5": 0.1, "cor/mean@5": 0.1}  # sens evaluate --corruptions fog
    assert request.missing({**figures, **some}) == Request((), True, (5,))
    del five["cor/saturate@5"]  # grey images have no saturation
    complete = {**figures, "adv/fgsm@0.5": 0.1, **five}
    assert request.missing(complete) == Request((), False, ())
    assert request.missing(complete, official=True) == Request((), True, (3, 5))
    official = {name.replace("cor/", "official/"): value for name, value in complete.items()}
    assert request.missing(official, official=True) == request.missing(official) == Request((), False, ())
    del five["cor/extra_mean@5"]  # of an earlier version, whose mean was over all nineteen
    assert request.missing({**figures, "adv/fgsm@0.5": 0.1, **five}) == Request((), True, (5,))


def test_corruption_figure_shows_means_over_corruptions(reproduced: Path) -> None:
    run = next(iter((reproduced / "runs").glob("*-deep-*")))
    run_with_all = read_run(run)
    some = {
        name: value for name, value in run_with_all.figures.items() if not name.startswith("cor/") or "fog@" in name
    }
    some |= {"cor/mean@3": 0.99, "cor/mean@5": 0.99}  # sens evaluate --corruptions fog
    drawn = [
        {
            picture.name
            for picture in draw_pictures({"deep": [Finished(run, run_with_all.config, run_with_all.result, figures)]})
        }
        for figures in (run_with_all.figures, some)
    ]
    assert drawn[0] - drawn[1] == {"corruptions"}
    official = {name.replace("cor/", "official/"): value for name, value in run_with_all.figures.items()}
    for figures, origin in (
        (run_with_all.figures, "The ice of frost is ours too"),
        (official, "The official corrupted"),
    ):
        curves = _draw_all({"deep": [Finished(run, run_with_all.config, run_with_all.result, figures)]})[-1]
        assert (curves.name, "15 standard corruptions" in curves.caption) == ("corruptions", True)
        assert origin in curves.caption


def test_limit_reduces_training_samples() -> None:
    assert len(read_data("digits", None, 0, 100).train) == 100
    assert len(read_data("digits", None, 0, 10**9).train) == len(read_data("digits", None, 0).train)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        read_data("digits", None, 0, 0)


def toy(model: torch.nn.Module, data: se.Data, members: int = 5, **settings: object) -> se.Ensemble:
    """Return one untrained network, as a user's method."""
    ensemble = se.Ensemble([model])
    ensemble.adopt(data)
    return ensemble


def failing(model: torch.nn.Module, data: se.Data, **settings: object) -> se.Ensemble:
    raise RuntimeError("there is no method to it")


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reproduce")
    options = ["--smoke", "--seeds", "0", "1", "--out", str(out), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "table-uncertainty", "--method", "single", "structured", "deep", *options]) == 0
    return out / "smoke"


def test_study_writes_tables_and_figures(reproduced: Path) -> None:
    folder = reproduced / "table-uncertainty"
    text = (folder / "report.md").read_text()
    assert text.count("\n| structured, layer") == text.count("\n| structured, network") == 2  # one for each rule
    assert "Trained in float32." in text
    assert "±" in text
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 7
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.http", page)  # self-contained
    names = {path.stem.removeprefix("digits-lenet5-") for path in (folder / "figures").glob("*.png")}
    assert {"overhead", "front-parameters", "corruptions", "reliability", "discarding", "entropy", "kept"} <= names
    for path in (folder / "figures").glob("*.png"):
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert "Software" not in picture.info  # the version of matplotlib


def test_title_has_the_members_of_its_runs() -> None:
    titles = [
        name_members(study("table-accuracy", StudyOptions(methods=("structured",), seeds=(0,), smoke=smoke)))
        for smoke in (False, True)
    ]
    assert titles == ["Accuracy of ensembles of five", "Accuracy of ensembles of 3"]


def test_table_numbers_equal_the_runs_figures(reproduced: Path) -> None:
    wanted = study("table-uncertainty", StudyOptions(methods=("structured",), seeds=(0, 1), smoke=True))
    runs, figure = wanted.sources["structured, network", "fgsm-0.02/unc/filtered_accuracy"]
    text = (reproduced / "table-uncertainty" / "report.md").read_text()
    tables = text.partition("\n## Figures")[0].split("\n## ")[1:]
    assert [table.splitlines()[0].partition(",")[0] for table in tables] == [
        "Combined by the mean of probabilities",
        "Combined by the softmax of the mean logits",
    ]
    shown = []
    for rule, table in zip(("mean", "logits"), tables, strict=True):
        values = [read_run(reproduced / "runs" / run.folder).combined_by(rule)[figure] for run in runs]
        mean, spread = 50 * sum(values), 100 * abs(values[0] - values[1]) / 2**0.5
        row = next(line for line in table.splitlines() if line.startswith("| structured, network"))
        shown.append(f"{mean:.2f} ± {spread:.2f}")
        assert shown[-1] in row.replace("**", "")
    assert shown[0] != shown[1]


def test_both_rules_share_one_forward_pass(reproduced: Path) -> None:
    """Each file equals `evaluate` by its rule alone, thresholds of attacks and corruptions included."""
    options = StudyOptions(methods=("structured",), seeds=(0,), smoke=True)
    run = study("table-uncertainty", options).sources["structured, layer", "fgsm-0.02/cls/accuracy"][0][0]
    folder = reproduced / "runs" / run.folder
    ensemble, data = se.Ensemble.load(folder / "ensemble.safetensors"), read_data("digits", None, 0)
    for rule in ("mean", "logits"):
        figures = read_figures(folder / f"evaluation-test-{rule}.json")
        alone = se.evaluate(ensemble, data, combine=rule, fgsm=(0.02,))
        assert {name: figures[name] for name in alone} == pytest.approx(alone)
        assert "cor/mean@5/discarded" in figures
        assert "size/overhead" in figures
    assert is_complete(run, folder, Request(fgsm=(0.02,)))


def test_runs_of_earlier_versions_are_evaluated_by_the_second_rule(reproduced: Path, tmp_path: Path) -> None:
    run = study("table-uncertainty", StudyOptions(methods=("deep",), seeds=(1,), smoke=True)).experiments[0]
    folder = tmp_path / run.folder
    shutil.copytree(reproduced / "runs" / run.folder, folder)
    path = folder / "evaluation-test-logits.json"
    before = read_figures(path)
    path.unlink()
    assert read_run(folder).combined_by("logits") == {}
    assert not is_complete(run, folder, Request())
    assert measure_experiment(folder, Request(), device="cpu")[1]
    assert is_complete(run, folder, Request())
    assert not is_complete(run, folder, Request(fgsm=(0.02,)))  # known of the mean alone
    figures = read_figures(path)
    assert figures == pytest.approx({name: before[name] for name in figures})


def test_second_reproduce_runs_nothing(reproduced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (reproduced / "runs").rglob("*") if path.is_file()}
    options = ["--smoke", "--seeds", "0", "1", "--out", str(reproduced.parent), "--quiet"]
    assert main(["reproduce", "table-uncertainty", "--method", "single", "structured", "deep", *options]) == 0
    assert "nothing new to run" in capsys.readouterr().out
    # Another table of the same runs trains nothing either.
    assert main(["reproduce", "table-accuracy", "--method", "structured", *options]) == 0
    assert "nothing new to run" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (reproduced / "runs").rglob("*") if path.is_file()}


def test_page_of_a_study_on_the_validation_split_shows_no_test_figures(
    reproduced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are chosen by such a study: nobody should choose them by its charts, which are of the test split."""
    options = StudyOptions(methods=("deep",), seeds=(0,), smoke=True)
    wanted = replace(study("table-ece", options), split="validation")
    monkeypatch.setattr(reproduce_module, "study", lambda *_: wanted)
    page = reproduce_module.reproduce("by-validation", reproduced, options, quiet=True).page
    assert not (page.parent / "figures").exists()
    for text in (page.read_text(encoding="utf-8"), (page.parent / "report.md").read_text(encoding="utf-8")):
        assert "Figures of the validation split only: rows are chosen by them." in text
        assert "Trained in float32." in text
        assert "test samples" not in text
        assert "0 runs" not in text


def test_label_of_a_function_of_this_package_is_its_name() -> None:
    def label(method: str) -> str:
        return Finished(Path(), {"method": method, "method_arguments": {"seed": 1}}, {}, {}).label

    assert label(METHOD) == "train_random_subsets, seed=1"
    assert label("package.module:mine") == "package.module:mine, seed=1"


def test_user_method_is_a_row_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "table-accuracy", "--method", "tests.report.test_reproduce:toy", "single", *options]) == 0
    assert "| tests.report.test_reproduce:toy |" in capsys.readouterr().out


def test_failing_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "table-accuracy", "--method", "single", f"{__name__}:failing", *options]) == 1
    captured = capsys.readouterr()
    assert "failed" in captured.err
    assert "there is no method to it" in captured.err
    assert "| tests.report.test_reproduce:failing | – |" in captured.out
    assert "| single | –" not in captured.out


def test_front_has_every_number_of_members(reproduced: Path) -> None:
    runs = [
        read_run(reproduced / "runs" / run.folder)
        for run in study(
            "table-uncertainty", StudyOptions(methods=("single", "structured"), seeds=(0,), smoke=True)
        ).experiments[:2]
    ]
    points = list_front_points({run.label: [run] for run in runs}, "parameters")
    single = [point for point in points if point.method == "single"]
    structured = [point for point in points if point.method.startswith("structured")]
    assert [point.memory for point in single] == [1.0]
    assert [point.label for point in structured] == ["N=1", "N=2", "N=3"]
    all_figures = runs[1].figures
    assert structured[-1].memory == pytest.approx(all_figures["size/overhead"])
    assert list(structured[-1].accuracy) == [pytest.approx(all_figures["cls/accuracy"])]
    assert structured[0].memory == pytest.approx(all_figures["size/overhead"] / 3)


def test_report_accepts_any_run_folders(reproduced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = sorted((reproduced / "runs").iterdir())
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "report")]) == 0
    text = capsys.readouterr().out
    assert "digits/lenet5" in text
    assert (tmp_path / "report" / "report.html").exists()
    assert f"{len(runs)} runs, mean" in text
    assert main(["report", str(runs[0]), str(runs[0]), "--out", str(tmp_path / "twice")]) == 0
    assert "1 run, mean" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_report_separates_runs_that_differ_in_more_than_the_seed() -> None:
    def run(seed: int, folder: str = "a", **more: object) -> Finished:
        config = Experiment("digits", "lenet5", "deep", seed=seed, **more).config()  # type: ignore[arg-type]
        return Finished(Path(folder), config, {}, {})

    runs = [run(0), run(1), run(0, "copy"), run(0, members=3), run(0, changes={"epochs": 9})]
    (groups,) = group_runs(runs).values()
    assert {label: len(seed_runs) for label, seed_runs in groups.items()} == {
        "deep, epochs=None, members=5": 2,
        "deep, epochs=None, members=3": 1,
        "deep, epochs=9, members=5": 1,
    }
    assert list(group_runs(runs[:3]).values()) == [{"deep": runs[:2]}]


def test_damaged_evaluation_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "evaluation-test-mean.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"is damaged.*delete it"):
        read_figures(path)
    assert not is_complete(Experiment("digits", "lenet5", "single"), tmp_path, Request())


def test_damaged_samples_file_is_measured_again(reproduced: Path, tmp_path: Path) -> None:
    run = study("table-uncertainty", StudyOptions(methods=("deep",), seeds=(1,), smoke=True)).experiments[0]
    folder = tmp_path / run.folder
    shutil.copytree(reproduced / "runs" / run.folder, folder)
    request = Request()
    assert is_complete(run, folder, request)
    path = folder / "samples.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:50])
    with pytest.warns(UserWarning, match="samples.safetensors is damaged"):
        assert not is_complete(run, folder, request)
    with pytest.warns(UserWarning, match="is damaged"):
        assert read_run(folder).samples == {}
    with pytest.warns(UserWarning, match="is damaged"):
        assert measure_experiment(folder, request, device="cpu")[1]
    assert is_complete(run, folder, request)
    assert torch.equal(load(content)["confidence"], read_run(folder).samples["confidence"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "nope"], "method must be one of single"),
        (["--dataset", "digits", "--model", "nope"], "model must be one of"),
        (["--dataset", "nope"], "dataset must be one of 'digits', 'mnist'"),
        (["--dataset", "nope:nope"], "cannot be imported"),
    ],
)
def test_unknown_names_are_errors_before_any_work(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "table-accuracy", *options, "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()  # before any work


def test_experiment_round_trips_through_its_configuration() -> None:
    experiment = Experiment("digits", "lenet5", "structured", method_arguments={"prune": 0.5})
    assert "limit" not in experiment.config()
    assert Experiment(**experiment.config()).folder == experiment.folder


def test_continual_studies_have_the_papers_cells_and_settings() -> None:
    accuracy = study("table-continual", StudyOptions())
    assert len(accuracy.paper) == 18
    runs, figure = accuracy.sources["supsup", "cifar100/half-vgg11"]
    assert figure == "cl/accuracy"
    assert runs[0].config()["tasks"] == 10
    assert runs[0].config()["method_arguments"] == {"epochs": 50}
    ablation = study("table-continual-ablation", StudyOptions())
    runs, _ = ablation.sources["network-soft", "cifar10/half-vgg11"]
    assert runs[0].method_arguments == {"scope": "network", "extraction": "soft"}
    overhead = study("table-continual-overhead", StudyOptions())
    assert overhead.rows == ("single", "supsup", "pruning", "batch-ensemble", "structured")
    # (M - 1)·b floats; M·b binary values; 165 and 2,499 factors, 142 and 1,376 neurons per task
    expected = {
        "single": (-1, 1, 0, -1, 1, 0),
        "supsup": (0, 0, 1, 0, 0, 1),
        "pruning": (0, 0, 1, 0, 0, 1),
        "batch-ensemble": (0, 165 / 50_550, 0, 0, 2_499 / 2_304_864, 0),
        "structured": (0, 0, 142 / 50_550, 0, 0, 1_376 / 2_304_864),
    }
    for row, values in expected.items():
        assert [overhead.counted[row, column][0] for column in overhead.columns] == pytest.approx(values)
    assert overhead.paper["structured", "half-vgg11/size/binaries_per_task"].below
    memory = study("table-continual-memory", StudyOptions())
    assert not memory.experiments
    differing = {key for key, cell in memory.paper.items() if memory.counted[key] != [cell.value]}
    assert differing == {("batch-ensemble", "lenet5/size/bits_per_task")}  # 165 factors, of which the paper prints 164


def test_reproduce_smoke_writes_continual_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--smoke", "--seeds", "0", "--out", str(tmp_path), "--backend", "sequential", "--quiet"]
    assert main(["reproduce", "table-continual", "--method", "structured", "naive", "--epochs", "1", *options]) == 0
    assert "| structured |" in capsys.readouterr().out
    folder = tmp_path / "smoke" / "table-continual"
    names = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"digits-lenet5-memory", "digits-lenet5-matrix-naive", "digits-lenet5-capacity"} <= names
    assert main(["reproduce", "table-continual", "--method", "structured", "naive", "--epochs", "1", *options]) == 0
    assert "nothing new to run" in capsys.readouterr().out
    assert main(["reproduce", "table-continual-overhead", *options]) == 0
    assert "lenet5 binary values per task / b" in capsys.readouterr().out
    assert main(["reproduce", "table-continual-memory", *options]) == 0
    assert "10,560 (10,496¹)" in capsys.readouterr().out
