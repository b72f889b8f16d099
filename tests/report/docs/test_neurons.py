"""Study of subsets: the analysis of variance on the page, its sentences, and the way from the queue, on digits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from scipy.stats import t as student

from structured_ensembles.paper.queue import run_queue
from structured_ensembles.paper.sections import Planned
from structured_ensembles.paper.studies import StudyOptions
from structured_ensembles.paper.subsets import analyse_subsets, subsets
from structured_ensembles.paper.variance import TwoWay
from structured_ensembles.report.docs import neurons
from structured_ensembles.report.docs.differences import Difference
from structured_ensembles.report.docs.neurons import (
    read_values,
    write_neurons,
    write_subset_analysis,
    write_subset_sentence,
)
from structured_ensembles.report.docs.records import Records, read_records
from structured_ensembles.report.docs.topics import render_topic, subsets_topic
from structured_ensembles.runs.finished import Finished

TRIAL = StudyOptions(smoke=True, epochs=2, limit=512)


def test_sentence_says_whether_subsets_differ() -> None:
    analysis = TwoWay((5, 20), 9.04, 0.0001, (0.0018, 0.0, 0.0012))
    text = write_subset_sentence(0.5, analysis)
    assert "subsets **differ** (F(5, 20) = 9.0, p = 1e-04; accuracy), by a standard deviation of 0.18 points" in text
    assert "another training of the same subset by 0.12" in text
    maximum = quad(lambda z: z * 100 * norm.pdf(z) * norm.cdf(z) ** 99, -9, 9)[0]  # expected, of 100 normal values
    assert f"would be about {0.18 * maximum:.2f} points better" in text
    text = write_subset_sentence(0.8, replace(analysis, f=1.9, p=0.1402))
    assert "**no measurable difference** which neurons are kept (F(5, 20) = 1.9, p = 0.140; accuracy)" in text
    assert write_subset_sentence(0.8, None) == "80 % pruned: not run."


def test_analysis_needs_every_subset_and_seed() -> None:
    values = np.random.default_rng(0).normal(size=(6, 5)).tolist()
    assert analyse_subsets(values) is not None
    assert analyse_subsets([*values[:5], values[5][:4]]) is None
    assert analyse_subsets([]) is None


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        # Of 1, 2 and 3: mean 2, standard error 1/√3; of 0, 1 and 2: mean 1, 1.7 standard errors.
        (
            {"cls/accuracy": (-0.0, -0.01, -0.02), "cal/nll": (0.1, 0.2, 0.3)},
            "accuracy −1.00 ± 0.58 points (not told apart), NLL +0.2000 ± 0.0577 (worse), 3 seeds",
        ),
        (
            {"cls/accuracy": (0.01, 0.02, 0.03), "cal/nll": (-0.1, -0.2, -0.3)},
            "accuracy +2.00 ± 0.58 points (better), NLL −0.2000 ± 0.0577 (better), 3 seeds",
        ),
        (
            {"cls/accuracy": (0.01,), "cal/nll": (-0.1,)},
            "accuracy +1.00 points, NLL −0.1000, one seed, a lead",
        ),
    ],
)
def test_sentence_judges_accuracy_and_nll_in_either_direction(
    differences: dict[str, tuple[float, ...]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        neurons, "subtract_rows", lambda _, __, ___, figure, ____: Difference(figure, differences[figure])
    )
    page = write_neurons(Records([], {}))
    assert f"learned − drawn by lot, ResNet20: {text}; mirrored − drawn by lot" in page
    assert f"by more than 2 standard errors, as in {200 * student.cdf(-2, 2):.0f} of 100 cases" in page


def test_item_without_runs_says_so() -> None:
    text = write_neurons(Records([], {}))
    assert text.count("not run") == 3
    assert "\n" not in text


def test_paragraph_and_page_speak_of_the_accuracy_of_subsets() -> None:
    """Subset n has an accuracy of 0.9 + n/100 in all runs but for noise; its NLL is noise only."""
    wanted, noise = subsets(StudyOptions()), np.random.default_rng(0).normal(size=(5, 6, 2)) / 1000
    halves = [run for run in wanted.experiments if run.method_arguments["prune"] == 0.5]
    done = {}
    for number, run in enumerate(halves):
        figures = {}
        for member in range(6):
            figures[f"member/{member}/accuracy"] = 0.9 + member / 100 + noise[number, member, 0]
            figures[f"member/{member}/nll"] = 0.3 + noise[number, member, 1]
        done[run.folder] = Finished(Path(run.folder), run.config(), {}, figures)
    records = Records([], done)
    paragraph, page = write_neurons(records), write_subset_analysis(records, wanted)
    for text in (paragraph, page):
        assert "50 % pruned: subsets **differ**" in text
        assert "80 % pruned: not run." in text
    deviation = np.arange(6).std(ddof=1)  # of 0, 1, …, 5 points
    assert f"by a standard deviation of {deviation:.2f} points" in paragraph


def test_study_goes_from_the_queue_to_the_page(tmp_path: Path) -> None:
    wanted, section = subsets(TRIAL), "subsets-digits"
    planned = [Planned(section, run, wanted.request) for run in wanted.experiments]
    halves = [run for run in planned if run.experiment.method_arguments["prune"] == 0.5]
    progress = run_queue(halves, tmp_path, backend="sequential", device="cpu", quiet=True)
    assert (len(progress.new), progress.failed) == (5, {})
    records = read_records(tmp_path, planned)
    page = render_topic(subsets_topic(TRIAL), records)
    table = np.array(read_values(records, wanted, 0.5, "cls/accuracy"))
    assert table.shape == (6, 5)
    # By an independent route: sums of squares of the residuals of means.
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    f = (5 * table.mean(1).var(ddof=1)) / ((rest**2).sum() / 20)
    line = next(line for line in page.splitlines() if line.startswith("| 50 % | accuracy (points) |"))
    assert f"| F(5, 20) = {f:.1f} |" in line
    unexplained = (rest**2).sum() / 20
    variances = (table.mean(1).var(ddof=1) - unexplained / 5, table.mean(0).var(ddof=1) - unexplained / 6, unexplained)
    cells = [f"{100 * max(0.0, variance) ** 0.5:.2f}" for variance in variances]
    assert len(set(cells)) > 1
    assert line.startswith(f"| 50 % | accuracy (points) | {' | '.join(cells)} |")
    assert f"| 50 % pruned, subset 1 | {100 * table[0].mean():.2f} ± " in page
    assert "| 80 % | NLL | not run | not run | not run | not run | not run |" in page
    assert "- 80 % pruned: not run." in page
    single = [run.figures["member/0/accuracy"] for run in records.runs(run.experiment for run in halves)]
    assert single == pytest.approx(table[0])
