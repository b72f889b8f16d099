"""Sentences at the top of a page: three, with the figures of the runs in them."""

from pathlib import Path
from statistics import fmean

import pytest

from structured_ensembles.continual.results import read_continual_run
from structured_ensembles.report.page import group_runs
from structured_ensembles.report.web.summary import choose_subject, summarise
from structured_ensembles.runs.finished import Finished, read_run
from tests.support.paths import ROOT

RESULTS = ROOT / "results"


def run(method: str, **figures: float) -> Finished:
    names = {name.replace("__", "/"): value for name, value in figures.items()}
    config = {"method": method, "dataset": "d", "model": "m", "seed": 0, "method_arguments": {}}
    return Finished(Path("x"), config, {}, names)


def test_recorded_runs_give_three_sentences_with_their_figures() -> None:
    runs = [read_run(folder) for folder in sorted((RESULTS / "cifar10-resnet20").iterdir())]
    ((setup, labelled),) = group_runs(runs).items()
    sentences = summarise(setup, labelled)
    assert len(sentences) == 3

    def percent(label: str, name: str) -> str:
        return f"{100 * fmean(run.figures[name] for run in labelled[label]):.2f} %"

    assert f"is right on {percent('structured', 'cls/accuracy')}" in sentences[0]
    assert f"deep {percent('deep', 'cls/accuracy')}" in sentences[0]
    assert f"{percent('structured', 'cal/ece')} apart" in sentences[1]
    assert f"{percent('structured', 'unc/kept_accuracy')} of the rest" in sentences[2]


def test_continual_runs_give_three_sentences_too() -> None:
    runs = [read_continual_run(folder) for folder in sorted((RESULTS / "split-mnist").iterdir())]
    ((setup, labelled),) = group_runs(runs).items()
    sentences = summarise(setup, labelled)
    assert len(sentences) == 3
    assert "over 5 tasks; single 99" in sentences[0]
    assert sentences[1].startswith("It forgets 0.00 points")
    assert "of its neurons are still free" in sentences[2]


def test_subject_is_the_structured_ensemble_or_the_best() -> None:
    deep, single = run("deep", cal__nll=0.1), run("single", cal__nll=0.2)
    assert choose_subject({"single": [single], "deep": [deep]}) == "deep"
    assert choose_subject({"deep": [deep], "structured, prune=0.9": [run("structured")]}) == "structured, prune=0.9"


@pytest.mark.parametrize("figures", [{}, {"cls__accuracy": float("nan")}, {"cls__accuracy": 0.5}])
def test_missing_figures_leave_out_their_clause(figures: dict[str, float]) -> None:
    sentences = summarise("d/m", {"deep": [run("deep", **figures)]})
    assert not any("nan" in sentence or "None" in sentence for sentence in sentences)
    assert len(sentences) == (1 if figures.get("cls__accuracy") == 0.5 else 0)


def test_regressions_are_told_by_their_errors() -> None:
    figures = {"reg__rmse": 1.5, "reg__member_rmse": 2.0, "conf__coverage": 0.91, "conf__width": 3.0}
    sentences = summarise("d/m", {"deep": [run("deep", **figures)], "single": [run("single", reg__rmse=2.5)]})
    assert "error of 1.5000; that of single 2.5000" in sentences[0]
    assert "2.0000" in sentences[1]
    assert "91.00 %" in sentences[2]
