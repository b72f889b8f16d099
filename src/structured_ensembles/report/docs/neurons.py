"""Does it matter which neurons a member keeps? Sentences from the recorded runs."""

from __future__ import annotations

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import Study, StudyOptions
from structured_ensembles.paper.subsets import COLUMNS, SHARES, SUBSETS, TRAINING_SEEDS, analyse_subsets, row_of
from structured_ensembles.paper.variance import TwoWay
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.report.docs.defaults import LIMIT, chance_beyond_limit, judge
from structured_ensembles.report.docs.differences import subtract_rows
from structured_ensembles.report.docs.records import NOT_RUN, Records

LEVEL = 0.05  # of the p-value below which subsets differ
BEST_OF_HUNDRED = 2.51  # standard deviations: the expected maximum of 100 normal values
FIGURES = {"cls/accuracy": "accuracy", "cal/nll": "NLL"}
TITLES = {"cls/accuracy": "accuracy (points)", "cal/nll": "NLL"}
HEADER = ("pruned", "figure", "between subsets", "between seeds", "rest", "F", "p")


def write_subset_analysis(records: Records, wanted: Study) -> str:
    """Write the analysis of variance of the study of subsets, and a sentence on each share."""
    lines, sentences = [], []
    for prune in SHARES:
        analyses = {column: analyse_subsets(read_values(records, wanted, prune, column)) for column in COLUMNS}
        for column, analysis in analyses.items():
            lines.append((f"{100 * prune:.0f} %", TITLES[column], *_format(analysis, column)))
        sentences.append(f"- {write_subset_sentence(prune, analyses['cls/accuracy'])}")
    return (
        f"Two-way analysis of variance, {SUBSETS} subsets × {len(TRAINING_SEEDS)} seeds: standard deviations, and the "
        f"test of whether subsets differ:\n\n{write_table(HEADER, lines, range(2, len(HEADER)))}\n\n"
        + "\n".join(sentences)
    )


def read_values(records: Records, wanted: Study, prune: float, column: str) -> list[list[float]]:
    """Read the table values[subset][training seed] of a figure, of the runs that are done."""
    table = []
    for number in range(SUBSETS):
        runs, figure = wanted.sources[row_of(prune, number), column]
        by_seed = [run.combined_by("mean", wanted.split) for run in records.runs(runs)]
        table.append([figures[figure] for figures in by_seed if figure in figures])
    return table


def write_subset_sentence(prune: float, analysis: TwoWay | None) -> str:
    """Say whether subsets differ in accuracy, and how much a selection among many of them could gain."""
    text = f"{100 * prune:.0f} % pruned: "
    if analysis is None:
        return f"{text}{NOT_RUN}."
    between, _, rest = (100 * deviation for deviation in analysis.deviations)
    test = f"{_name_f(analysis)} = {analysis.f:.1f}, p = {_format_p(analysis.p)}"
    if analysis.p >= LEVEL:
        return f"{text}it makes **no measurable difference** which neurons are kept ({test}; accuracy)."
    return (
        f"{text}subsets **differ** ({test}; accuracy), by a standard deviation of {between:.2f} points; another "
        f"training of the same subset by {rest:.2f}. The best of a hundred random subsets would be about "
        f"{BEST_OF_HUNDRED * between:.2f} points better than one drawn by lot."
    )


def write_neurons(records: Records) -> str:
    """Write a paragraph: learned against random, mirrored against random, and the test of subsets."""
    small = study("table-accuracy", StudyOptions(datasets=("cifar10",), models=("resnet20",)))
    pairs = {
        "learned − drawn by lot, ResNet20": (small, ("structured, layer", "random")),
        "mirrored − drawn by lot, trained wide ResNet20": (
            tuned_study(),
            ("prune-and-tune ×4, 30 + 10 epochs", "prune-and-tune ×4, random, 30 + 10 epochs"),
        ),
    }
    parts = [f"{text}: {_compare(records, *pair)}" for text, pair in pairs.items()]
    ceiling = study("subsets", StudyOptions())
    analyses = {prune: analyse_subsets(read_values(records, ceiling, prune, "cls/accuracy")) for prune in SHARES}
    tests = [write_subset_sentence(*item) for item in analyses.items()] if any(analyses.values()) else [f"{NOT_RUN}."]
    tested = f"{SUBSETS} random subsets × {len(TRAINING_SEEDS)} seeds: {' '.join(tests)}"
    verdicts = (
        f"better, worse: by more than {LIMIT:g} standard errors, as in {100 * chance_beyond_limit():.0f} of 100 cases "
        "without any difference: a lead"
    )
    return f"**Which neurons a member keeps**, on CIFAR-10 ({verdicts}). {'; '.join(parts)}. {tested}"


def _compare(records: Records, wanted: Study, pair: tuple[str, str]) -> str:
    """Format the differences in accuracy and NLL, each with its verdict, and the number of seeds."""
    parts, seeds = [], 0
    for figure, title in FIGURES.items():
        difference = subtract_rows(records, wanted, pair, figure, "mean")
        if difference is not None:
            verdict = judge(difference)
            parts.append(f"{title} {difference}{f' ({verdict})' if verdict else ''}")
            seeds = max(seeds, len(difference.values))
    if not parts:
        return NOT_RUN
    return f"{', '.join(parts)}, {'one seed, a lead' if seeds == 1 else f'{seeds} seeds'}"


def _format(analysis: TwoWay | None, column: str) -> tuple[str, ...]:
    """Format the standard deviations, F and p."""
    if analysis is None:
        return (NOT_RUN,) * 5
    metric = metric_of(column)
    deviations = (metric.shown(deviation) for deviation in analysis.deviations)
    return (*deviations, f"{_name_f(analysis)} = {analysis.f:.1f}", _format_p(analysis.p))


def _name_f(analysis: TwoWay) -> str:
    return f"F({analysis.freedom[0]}, {analysis.freedom[1]})"


def _format_p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"
