"""The study of tuned members: equal epochs, halves of the same base, and runs that work from start to end."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from structured_ensembles.paper.carry_out import carry_out
from structured_ensembles.paper.queue import is_finished
from structured_ensembles.paper.sections import Planned, plan_runs, tuned_members
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.report.docs.topics import TUNED_PAIRS
from structured_ensembles.runs.folder import read_history, read_result
from structured_ensembles.training import Recipe

TUNED = [run for run in plan_runs() if run.section == "tuned-wide-resnet20"]


def test_defaults_and_tuned_members_follow_the_front_in_the_queue() -> None:
    sections = list(dict.fromkeys(run.section for run in plan_runs()))
    fronts = [section for section in sections if section.startswith("front-")]
    first = 1 + sections.index(fronts[-1])
    assert sections[first : first + 2] == ["defaults-cifar10", "tuned-wide-resnet20"]
    assert {run.experiment.seed for run in TUNED} == {0, 1, 2}


def test_members_have_the_epochs_that_the_rows_say() -> None:
    for run in tuned_members((0,)):
        epochs = Recipe.named(run.recipe, **run.changes).epochs
        tuned = run.method_arguments.get("tune_epochs")
        assert (run.dataset, run.model, run.model_arguments) == ("cifar10", "resnet20", {"width": 4})
        if run.method == "prune-and-tune":
            assert (epochs - tuned, tuned) == (30, 10)
        else:
            # 40 as base and members one after the other, or 18: 30 + 4 · 10 epochs of a network, for four members.
            assert epochs in (40, 18)
            assert (epochs == 18) == (run.method == "random" and run.members * epochs == 72)
    study = tuned_study()
    assert {row for pair in TUNED_PAIRS for row in pair} <= set(study.rows)
    assert all(len(runs) == 3 for runs, _ in study.sources.values())


@pytest.mark.parametrize("row", ["prune-and-tune ×4, 30 + 10 epochs", "random ×4, 18 epochs"])
def test_tiny_run_of_the_study_works_from_start_to_end(row: str, tmp_path: Path) -> None:
    planned = tuned_study().sources[row, "cls/accuracy"][0][0]
    arguments = {**planned.method_arguments, **({"tune_epochs": 1} if "+" in row else {})}
    tiny = replace(
        planned,
        dataset="digits",
        model="lenet5",
        model_arguments={},
        method_arguments=arguments,
        changes={"epochs": 2},
        limit=200,
    )
    run = Planned("tuned", tiny)
    carry_out(tiny, tmp_path / run.name, run.request, None, "cpu")
    assert is_finished(run, tmp_path)
    result = read_result(tmp_path / run.name)
    assert result["epochs"] == 2
    rows = read_history(tmp_path / run.name, result)
    assert len(rows) == (1 + 4 if "+" in row else 2 * 4)  # network-epochs, the base's included
    assert yaml.safe_load((tmp_path / run.name / "config.yaml").read_text())["method"] == planned.method
