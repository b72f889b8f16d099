"""The HTML page of `sens demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from structured_ensembles.calibration.conformal import ConformalSets
from structured_ensembles.channels import ChannelGraph, ChannelGroup
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.diversity import disagreement_matrix
from structured_ensembles.evaluation.predictions import gather_predictions
from structured_ensembles.paper.layout import TableData
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of
from structured_ensembles.report.front import FrontPoint
from structured_ensembles.report.web.charts import (
    chart_coverage,
    chart_front,
    chart_kept,
    chart_learning,
    chart_reliability,
)
from structured_ensembles.report.web.page import Page, Section, sample_section, write_page
from structured_ensembles.report.web.plots import Chart
from structured_ensembles.report.web.run_sections import without_missing
from structured_ensembles.report.web.sample_details import SampleDetails, measure_details
from structured_ensembles.report.web.tables import Cell, Table, plain_table, table_of_figures
from structured_ensembles.report.web.uncertainty_charts import chart_disagreement, chart_discarding, chart_entropies
from structured_ensembles.runs.measurement import figures_of_first_members

COLUMNS = {
    "accuracy (%)": "cls/accuracy",
    "ECE before temperature (%)": "cal/ece",
    "ECE after (%)": "cal/ece_t",
    "NLL before temperature": "cal/nll",
    "NLL after": "cal/nll_t",
    "coverage of the sets (%)": "conf/coverage",
    "set size": "conf/size",
}


@dataclass(frozen=True)
class Outcome:
    """Trained ensemble with its figures, its file and its training time."""

    title: str
    ensemble: Ensemble
    figures: Mapping[str, float]
    file_bytes: int
    path: Path
    seconds: float


def write_demo_page(path: Path, data: Data, graph: ChannelGraph, outcomes: Sequence[Outcome]) -> Path:
    """Write the page: comparison, kept channels, calibration, the least certain digits, the channels of the network.

    outcomes: ensembles with a temperature, a threshold and conformal sets; one of them structured.
    """
    subject = next(outcome for outcome in outcomes if outcome.ensemble.subnets is not None)
    trained = [outcome for outcome in outcomes if outcome.seconds]
    test = data.split("test")
    predictions = {outcome.title: gather_predictions(outcome.ensemble, test) for outcome in trained}
    details = {
        outcome.title: measure_details(outcome.ensemble, data, predictions[outcome.title]) for outcome in trained
    }
    page = Page(
        f"{_in_words(len(subject.ensemble))} networks cut out of one",
        _summarise(data, outcomes, subject),
        _explain(data, graph, subject),
        [
            Section("Side by side", tables=[_compare(outcomes, subject)], charts=_quality(trained, graph, predictions)),
            Section("Does it know when it does not know?", charts=_certainty(trained, subject, predictions, details)),
            *_optional(sample_section(details[subject.title], f"the {subject.title}")),
            Section("Members", charts=_members(trained, subject)),
            Section("Which channels can be removed", tables=[_tabulate_channels(graph)]),
            Section(
                "Next",
                [
                    "Your own network and data: sens train --help. What there is: sens models, sens datasets. "
                    "Predictions from a file: sens predict. Several runs side by side: sens report."
                ],
            ),
        ],
    )
    return write_page(path, page)


def _summarise(data: Data, outcomes: Sequence[Outcome], subject: Outcome) -> list[str]:
    """Say in three sentences what the figures mean."""
    base = outcomes[0]
    figures, parameters = subject.figures, base.figures["size/parameters"]
    accuracies = ", ".join(
        f"the {outcome.title} on {100 * outcome.figures['cls/accuracy']:.2f} % with "
        f"{outcome.figures['size/parameters'] / parameters:.1f} times the parameters"
        for outcome in outcomes
        if outcome.seconds and outcome not in (subject, base)
    )
    stored = next((outcome for outcome in outcomes if not outcome.seconds), subject)  # the subject in fewer bits
    return [
        f"The {subject.title} is right on {100 * figures['cls/accuracy']:.2f} % of the {len(data.split('test'))} test "
        f"images with {figures['size/parameters'] / parameters:.1f} times the parameters of one network, "
        f"which is right on {100 * base.figures['cls/accuracy']:.2f} %; {accuracies}.",
        f"Its confidence and its accuracy are {100 * figures['cal/ece']:.2f} % apart on average, and "
        f"{100 * figures['cal/ece_t']:.2f} % after a temperature; one network: "
        f"{100 * base.figures['cal/ece']:.2f} % and {100 * base.figures['cal/ece_t']:.2f} %.",
        f"It discards {100 * (1 - figures['unc/kept']):.1f} % of the images as too uncertain and is right on "
        f"{100 * figures.get('unc/kept_accuracy', 0):.2f} % of the rest; {stored.title.removeprefix('… ')}, it takes "
        f"{stored.file_bytes / 1024:,.0f} KiB on disk, one network {base.file_bytes / 1024:,.0f} KiB.",
    ]


def _explain(data: Data, graph: ChannelGraph, subject: Outcome) -> list[str]:
    """Say what was trained, and what the words mean."""
    number, held_out = len(data.split("test")), len(data.split("validation"))
    promise = subject.ensemble.calibration.conformal
    sets = (
        f"Sets: all classes that may be the right one, for a coverage of {100 * promise.coverage:g} %, conformal, "
        if (isinstance(promise, ConformalSets))
        else ""
    )
    return [
        f"A ResNet20 ({graph.num_parameters():,} parameters) on scikit-learn's handwritten digits: {len(data.train):,} "
        f"images to learn from, {number} to test on. Each member of the structured ensemble keeps half of the channels "
        f"in every block. One seed: a difference of one image is {100 / number:.2f} points.",
        "ECE: how far confidence and accuracy are apart (30 bins). NLL: negative log-likelihood. Lower is better for "
        f"both. The temperature is fitted to the {held_out} images of the validation split; with so few, it is itself "
        f"uncertain. {sets}{'fitted to the same images.' if sets else ''}",
        "Bold: the best of a column. Shaded: what the sentences above are about.",
    ]


def _compare(outcomes: Sequence[Outcome], subject: Outcome) -> Table:
    """Tabulate all outcomes, a row each."""
    figures = {
        (outcome.title, column): [outcome.figures[name]] for outcome in outcomes for column, name in COLUMNS.items()
    }
    titles = [outcome.title for outcome in outcomes]
    table = table_of_figures(TableData("", titles, list(COLUMNS), COLUMNS, figures, {}), {subject.title})
    rows = []
    for outcome, cells in zip(outcomes, table.rows, strict=True):
        parameters, temperature = outcome.figures["size/parameters"], outcome.ensemble.temperature
        rows.append(
            [
                *cells,
                Cell(f"{temperature:.2f}", temperature),
                Cell(f"{parameters:,.0f}", parameters),
                Cell(f"{outcome.file_bytes / 1024:,.0f}", float(outcome.file_bytes)),
                Cell(f"{outcome.seconds:.1f}", outcome.seconds) if outcome.seconds else Cell("–"),
            ]
        )
    header = [*table.header, "temperature", "parameters", "file (KiB)", "training (s)"]
    return Table("", header, rows, highlighted=table.highlighted)


def _quality(
    trained: Sequence[Outcome], graph: ChannelGraph, predictions: Mapping[str, tuple[Tensor, Tensor]]
) -> list[Chart]:
    """Chart quality against memory, for the first 1, 2, … members of every ensemble."""
    points = []
    for outcome in trained:
        figures = figures_of_first_members(*predictions[outcome.title])
        members = len(outcome.ensemble)
        for number in range(1, members + 1):
            memory = outcome.figures["size/parameters"] * number / members / graph.num_parameters()
            quality = ([figures[f"first/{number}/{name}"]] for name in ("accuracy", "nll", "ece"))
            points.append(FrontPoint(outcome.title, f"N={number}", memory, *quality))
    return without_missing([chart_front(points, "parameters")])


def _certainty(
    trained: Sequence[Outcome],
    subject: Outcome,
    predictions: Mapping[str, tuple[Tensor, Tensor]],
    details: Mapping[str, SampleDetails],
) -> list[Chart]:
    """Chart what is known of confidence, sets, entropy and disagreement."""
    uncertain = {}
    for outcome in trained:
        logits, targets = predictions[outcome.title]
        temperature = outcome.ensemble.temperature
        correct = combine_logits(logits, "mean", temperature).argmax(-1) == targets
        uncertain[outcome.title] = (uncertainty_of(logits, temperature).entropy, correct)
    entropy, correct = uncertain[subject.title]
    by_outcome = {"right": entropy[correct], "wrong": entropy[~correct]}
    return without_missing(
        [
            chart_reliability(details),
            chart_coverage(details),
            chart_discarding(uncertain),
            chart_entropies(by_outcome, subject.ensemble.threshold, subject.title),
            chart_disagreement(disagreement_matrix(predictions[subject.title][0]), subject.title),
        ]
    )


def _members(trained: Sequence[Outcome], subject: Outcome) -> list[Chart]:
    """Chart the kept channels and the learning curves of all that have any, the subject's first."""
    histories = {
        outcome.title: outcome.ensemble.history
        for outcome in sorted(trained, key=lambda outcome: outcome is not subject)
        if outcome.ensemble.history is not None
    }
    curves = [chart_learning(history.rows, title) for title, history in histories.items()]
    return [*chart_kept(subject.ensemble.subnets or (), subject.title), *without_missing(curves)]


def _tabulate_channels(graph: ChannelGraph) -> Table:
    """Tabulate the channel groups of the network, with all layers that compute and read them."""

    def describe(group: ChannelGroup) -> str:
        return group.reason or ("yes, not exact" if group.approximate else "yes")

    rows = [
        (
            group.name,
            group.size,
            ", ".join(group.producers) or None,
            ", ".join((*group.consumers, *(f"{module} (product)" for module in group.products))) or None,
            describe(group),
        )
        for group in graph.groups
    ]
    channels = sum(graph.prunable.values())
    note = f"{len(graph.prunable)} of {len(graph.groups)} groups can be pruned: {channels:,} channels."
    return plain_table("", ("group", "channels", "computed by", "read by", "prunable"), rows, [note])


def _optional(section: Section | None) -> list[Section]:
    return [] if section is None else [section]


def _in_words(number: int) -> str:
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return words[number] if number < len(words) else str(number)
