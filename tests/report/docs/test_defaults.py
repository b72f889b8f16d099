"""Study of defaults: verdicts by two standard errors, and the way from the queue to the page, on digits."""

from pathlib import Path

import pytest
import yaml
from scipy.stats import t as student

from structured_ensembles.paper.defaults import (
    CENTRE,
    FIGURES,
    defaults,
    defaults_on_test,
    defaults_rows,
    row_before,
)
from structured_ensembles.paper.queue import run_queue, write_queue
from structured_ensembles.paper.sections import Planned
from structured_ensembles.paper.studies import StudyOptions
from structured_ensembles.report.docs.defaults import (
    judge,
    list_pairs,
    write_chance,
    write_choice_of_defaults,
    write_sentence,
)
from structured_ensembles.report.docs.differences import Difference, list_runs_of_row
from structured_ensembles.report.docs.records import Records, read_records
from structured_ensembles.report.docs.topics import defaults_topic, render_topic
from structured_ensembles.runs.finished import Finished

TRIAL = StudyOptions(smoke=True, epochs=2, limit=64)


def test_every_arm_changes_one_setting() -> None:
    rows = defaults_rows()
    for label, row in rows.items():
        before = row_before(label)
        if before is None or label.endswith("combination") or row.method == "prune-and-tune":
            continue
        old = rows[before]
        if row.method == "taught":  # and nothing else; one network is taught as a member with all of the memory
            assert (row.members, row.changes) == (old.members, old.changes), label
            assert row.arguments == {"memory": 1.0, "coupled": True, **old.arguments, "teachers": 4}, label
            continue
        arguments = {
            name for name in {*row.arguments, *old.arguments} if row.arguments.get(name) != old.arguments.get(name)
        }
        assert len(arguments) + len(row.changes) + (row.members != old.members) == 1, label


def test_test_figures_are_of_rows_named_before_the_runs_and_epochs_are_not_chosen() -> None:
    """Neither rows nor epochs may be chosen by figures of the split that they are shown on."""
    shown = defaults_on_test(StudyOptions())
    assert shown.split == "test"
    combined = [f"{method}, combination" for method in ("random ×4", "single", "deep ×4")]
    taught = [f"{method}, taught" for method in ("random ×4", "single", "random ×4, combination")]
    assert sorted(shown.rows) == sorted(["random ×4", "single", "deep ×4", *combined, *taught])
    chosen_by = defaults(StudyOptions())
    assert chosen_by.split == "validation"
    assert set(shown.rows) < set(chosen_by.rows)
    assert all(run.changes["keep"] == "last" for run in chosen_by.experiments)


@pytest.mark.parametrize(
    ("figure", "values", "verdict"),
    [
        # Mean 2, standard deviation 1, standard error 1/√3 = 0.577: 3.5 standard errors.
        ("cls/accuracy", (0.01, 0.02, 0.03), "better"),
        ("cal/nll", (0.01, 0.02, 0.03), "worse"),
        ("cal/ece15", (-0.03, -0.02, -0.01), "better"),
        # Mean 1, deviation 1: 1.73 standard errors.
        ("cal/nll", (0.0, 0.01, 0.02), "not told apart"),
        ("cal/nll", (-0.1, -0.1), None),
    ],
)
def test_verdict_by_two_standard_errors(figure: str, values: tuple[float, ...], verdict: str | None) -> None:
    assert judge(Difference(figure, values)) == verdict
    assert judge(None) is None


def test_sentence_names_the_figures_of_each_verdict() -> None:
    pair = ("a", "b")
    text = write_sentence(pair, ["better", "worse", "not told apart"], 3)
    assert text == "a, against b: **better** in accuracy, **worse** in NLL, not told apart in ECE."
    assert write_sentence(pair, ["better", "better", "better"], 3).endswith("**better** in accuracy and NLL and ECE.")
    assert "**not told apart** in accuracy, NLL and ECE" in write_sentence(pair, ["not told apart"] * 3, 3)
    text = write_sentence(pair, ["not told apart", "worse", "worse"], 3)
    assert text == "a, against b: **worse** in NLL and ECE, not told apart in accuracy."
    assert write_sentence(pair, [None] * 3, 2) == "a, against b: no verdict yet, 2 of 3 seeds."
    assert write_sentence(pair, [None] * 3, 0) == "a, against b: not run."


def test_combined_recipe_is_compared_with_a_deep_ensemble_by_the_same_recipe() -> None:
    pairs = list_pairs(list(defaults_rows()))
    assert ("random ×4", "deep ×4") in pairs
    assert ("random ×4, combination", "deep ×4, combination") in pairs
    assert ("random ×4, combination", "deep ×4") in pairs
    assert len(pairs) == len(set(pairs))
    assert list_pairs(["random ×4", "random ×8"]) == [("random ×8", "random ×4")]


def test_verdicts_claim_no_more_than_the_number_of_comparisons_allows() -> None:
    """Mean 2, standard error 1/√3 = 0.577: beyond two standard errors, though not beyond the limit for 78."""
    lead, none = Difference("cls/accuracy", (1.0, 2.0, 3.0)), Difference("cls/accuracy", (-1.0, 0.0, 1.0))
    clear = Difference("cls/accuracy", (1.0, 1.001, 1.0))
    text = write_chance([lead] * 20 + [none] * 58)
    assert (
        f"in {200 * student.cdf(-2, 2):.0f} of 100 cases: of the 78 compared here about 14 would be, and 20 are" in text
    )
    assert f"{student.ppf(1 - 0.025 / 78, 2):.1f} standard errors (Bonferroni, 5 %), 0 are results." in text
    assert "and 2 are" in write_chance([lead, clear] + [none] * 76)
    assert write_chance([lead, clear] + [none] * 76).endswith("1 is a result.")
    assert write_chance([]).endswith("of 100 cases: one alone is a lead and no result.")


def test_page_subtracts_the_changed_row_from_the_other_by_validation_figures_and_counts_complete_ones() -> None:
    wanted = defaults(StudyOptions())
    validation = {  # accuracies by seed; NLL and ECE are a tenth of them
        CENTRE: (0.94, 0.94, 0.94),
        f"{CENTRE}, mixup": (0.95, 0.96, 0.97),
        f"{CENTRE}, cutout": (0.92, 0.93),  # two seeds: no verdict
    }
    done = {}
    for row, accuracies in validation.items():
        for run, accuracy in zip(list_runs_of_row(wanted, row), accuracies, strict=False):
            figures = dict(zip(FIGURES, (accuracy, accuracy / 10, accuracy / 10), strict=True))
            on_test = dict.fromkeys(FIGURES, 0.5)
            done[run.folder] = Finished(
                Path(run.folder), run.config(), {}, on_test, on_test, {"mean": figures, "logits": on_test}
            )
    page = write_choice_of_defaults(Records([], done), wanted)
    # Differences of 1, 2 and 3 points: their mean is 2, its standard error 1/√3, so 3.5 errors.
    assert (
        f"| {CENTRE}, mixup − {CENTRE} | +2.00 ± 0.58 (+3.5) | +0.0020 ± 0.0006 (+3.5) | +0.20 ± 0.06 (+3.5) | 3 |"
        in page
    )
    assert f"- {CENTRE}, mixup, against {CENTRE}: **better** in accuracy, **worse** in NLL and ECE." in page
    assert f"| {CENTRE}, cutout − {CENTRE} | −1.50 ± 0.50 (−3.0) |" in page
    assert f"- {CENTRE}, cutout, against {CENTRE}: no verdict yet, 2 of 3 seeds." in page
    assert "of the 3 compared here about 1 would be, and 3 are." in page


def test_study_goes_from_the_queue_to_the_page(tmp_path: Path) -> None:
    wanted, section = defaults(TRIAL), "defaults-digits"
    planned = [Planned(section, run, wanted.request) for run in wanted.experiments]
    arms = [CENTRE, f"{CENTRE}, shared batches"]
    chosen = {run.folder for arm in arms for run in list_runs_of_row(wanted, arm)}
    progress = run_queue(
        [run for run in planned if run.experiment.folder in chosen], tmp_path, backend="sequential", device="cpu",
        quiet=True,
    )  # fmt: skip
    assert (len(progress.new), progress.failed) == (6, {})
    write_queue(planned, tmp_path)
    listed = yaml.safe_load((tmp_path / "queue.yaml").read_text(encoding="utf-8"))["runs"]
    assert {row["run"] for row in listed if row.get("done")} == {f"{section}/{folder}" for folder in chosen}
    records = read_records(tmp_path, planned)
    page = render_topic(defaults_topic(TRIAL), records)
    # The table has the means of the validation split, which are in files of their own.
    validation = [records.done[run.folder].validation["mean"] for run in list_runs_of_row(wanted, CENTRE)]
    accuracy = sum(figures[FIGURES[0]] for figures in validation) / 3
    line = next(line for line in page.splitlines() if line.startswith(f"| {CENTRE} |"))
    assert line.startswith(f"| {CENTRE} | {100 * accuracy:.2f} ± ")
    assert not any(name.endswith("_t") for name in validation[0])
    on_test = sum(records.done[run.folder].figures["cls/accuracy"] for run in list_runs_of_row(wanted, CENTRE)) / 3
    last = [line for line in page.splitlines() if line.startswith(f"| {CENTRE} |")][-1]
    assert f"| {100 * on_test:.2f} ± " in last
    assert on_test != accuracy
    shared = next(line for line in page.splitlines() if line.startswith(f"- {arms[1]}, against {CENTRE}: "))
    assert shared.partition(": ")[2].startswith(("**better**", "**worse**", "**not told apart**"))
    assert f"- {CENTRE}, mixup, against {CENTRE}: not run." in page
    assert f"| {CENTRE}, mixup | not run | not run | not run | 0 |" in page
