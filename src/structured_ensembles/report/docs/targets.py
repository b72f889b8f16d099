"""Targets of the project, and whether the finished runs meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from structured_ensembles.common.markdown import write_table
from structured_ensembles.common.plurals import counted
from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.sections import ABSOLUTE_CHECK
from structured_ensembles.paper.studies import SEEDS, Study, StudyOptions
from structured_ensembles.paper.wide_studies import tuned_study
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.report.docs.differences import list_runs_of_row, subtract_rows
from structured_ensembles.report.docs.records import NOT_RUN, Records
from structured_ensembles.report.docs.topics import CENTRES

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
HEADER = ("target", "figure", "seeds", "verdict")
BETTER_IN = ("cls/accuracy", "cal/nll", "cal/ece15")


@dataclass(frozen=True)
class Target:
    """Target to be met. figure: of our runs, as text. met: None until a run tells."""

    group: str
    text: str
    figure: str = "–"
    seeds: int = 0
    planned_seeds: int = len(SEEDS)
    met: bool | None = None

    @property
    def line(self) -> tuple[str, str, str, str]:
        """Format the line of the table: target, figure, seeds, verdict."""
        verdict = NOT_RUN if self.met is None else "met" if self.met else "**not met**"
        if self.met is not None and self.seeds < self.planned_seeds:
            verdict += " so far"
        return f"{self.group}: {self.text}", self.figure, f"{self.seeds} of {self.planned_seeds}", verdict


def list_targets(records: Records) -> list[Target]:
    """List every target with the figures that the finished runs have for it."""
    listed = [*_main(records), _absolute_check(records)]
    for dataset in ("cifar10", "cifar100"):
        wanted = study("front", StudyOptions(datasets=(dataset,)))
        for centre in CENTRES:
            listed += _front(records, wanted, dataset, centre)
    listed += _tuned(records)
    return listed + [_continual(records, dataset) for dataset in NAMES]


def targets_table(listed: Sequence[Target]) -> str:
    """Write targets as a Markdown table; a group without runs takes one line."""
    lines = []
    for group, group_targets in group_targets_by_name(listed).items():
        if any(target.met is not None for target in group_targets):
            lines += [target.line for target in group_targets]
        else:
            text = f"{len(group_targets)} targets" if len(group_targets) > 1 else group_targets[0].text
            lines.append((f"{group}: {text}", "–", f"0 of {group_targets[0].planned_seeds}", NOT_RUN))
    return write_table(HEADER, lines, right=(1, 2))


def targets_summary(listed: Sequence[Target]) -> str:
    """Write which targets are met, not met and not run, in a line each: the README, which has them, must stay short."""
    met = []
    for group, group_targets in group_targets_by_name(listed).items():
        reached = [target for target in group_targets if target.met]
        if reached:
            seeds = f"{min(target.seeds for target in reached)} of {counted(group_targets[0].planned_seeds, 'seed')}"
            met.append(f"{group} ({len(reached)} of {counted(len(group_targets), 'target')}, {seeds})")
    missed = [f"{target.group}: {target.text} ({target.figure})" for target in listed if target.met is False]
    not_run = sum(target.met is None for target in listed)
    lines = [f"- **Met**: {'; '.join(met) or 'none yet'}.", f"- **Not met**: {'; '.join(missed) or 'none so far'}."]
    return "\n".join([*lines, f"- **Not run**: {not_run} of {counted(len(listed), 'target')}."])


def group_targets_by_name(listed: Sequence[Target]) -> dict[str, list[Target]]:
    """Sort targets by group."""
    groups: dict[str, list[Target]] = {}
    for target in listed:
        groups.setdefault(target.group, []).append(target)
    return groups


def _main(records: Records) -> list[Target]:
    """List the targets on CIFAR-10/ResNet20, by the paper's combination rule."""
    options = StudyOptions(datasets=("cifar10",), models=("resnet20",))
    rule: Combine = "logits"
    accuracy = study("table-accuracy", options)
    listed = []
    for row in ("structured, layer", "structured, network"):
        group = f"CIFAR-10/ResNet20, {row}, paper's rule"
        listed += [
            _bound(records, accuracy, row, "cls/accuracy", rule, group, 0.9095),
            _lead(records, accuracy, (row, "single"), rule, group, 0.018),
            _bound(records, accuracy, row, "cal/ece", rule, group, 0.039),
        ]
    return listed


def _bound(records: Records, wanted: Study, row: str, figure: str, rule: Combine, group: str, bound: float) -> Target:
    """Return the target that a figure reaches a bound, from below or above as the metric says."""
    metric = metric_of(figure)
    higher = metric.better == "higher"
    title = metric.title.removesuffix(" (%)")
    text = f"{title} {'≥' if higher else '≤'} {metric.shown(bound)} %"
    values = list(records.by_seed(list_runs_of_row(wanted, row), figure, rule).values())
    if not values:
        return Target(group, text)
    mean = fmean(values)
    met = mean >= bound if higher else mean <= bound
    error = f" ± {metric.shown(stdev(values) / sqrt(len(values)))}" if len(values) > 1 else ""
    return Target(group, text, f"{metric.shown(mean)}{error} %", len(values), met=met)


def _lead(records: Records, wanted: Study, pair: tuple[str, str], rule: Combine, group: str, points: float) -> Target:
    """Return the target that the first row has a share of `points` more accuracy than the second."""
    least = f"{100 * points:.1f} points above" if points else "that of"
    text = f"accuracy at least {least} {pair[1]}"
    lead = subtract_rows(records, wanted, pair, "cls/accuracy", rule)
    if lead is None:
        return Target(group, text)
    return Target(group, text, str(lead), len(lead.values), met=lead.mean >= points)


def _absolute_check(records: Records) -> Target:
    """Return the target that one ResNet18 has the usual accuracy."""
    group, text = "ResNet18 alone, 200 epochs, all images of CIFAR-10", "accuracy ≥ 95.30 %"
    values = records.by_seed([ABSOLUTE_CHECK], "cls/accuracy", "mean")
    if not values:
        return Target(group, text, planned_seeds=1)
    (accuracy,) = values.values()
    return Target(group, text, f"{100 * accuracy:.2f} %", 1, 1, accuracy >= 0.953)


def _front(records: Records, wanted: Study, dataset: str, row: str) -> list[Target]:
    """List the targets in the memory of one network: better than that network, and than others of its memory."""
    group = f"Front, {NAMES[dataset]}, four members in the memory of one{', coupled' * row.endswith('coupled')}"
    listed = [_lead(records, wanted, (row, "single"), "mean", group, 0.003)]
    for figure, share in (("cal/nll", 0.85), ("cal/nll_t", 0.85), ("cal/ece15", 0.5), ("cal/ece15_t", 0.5)):
        listed.append(_reduction(records, wanted, (row, "single"), figure, group, share))
    return listed + [_beats(records, wanted, (row, other), group) for other in ("batch-ensemble ×4", "mc-dropout ×4")]


def _tuned(records: Records) -> list[Target]:
    """List the targets of members that are tuned out of a trained network, against that network trained for longer."""
    wanted, group = tuned_study(), "CIFAR-10, four halves tuned out of a trained ResNet20, 4× wide"
    row, single = "prune-and-tune ×4, 30 + 10 epochs", "single, 40 epochs"
    return [
        _lead(records, wanted, (row, single), "mean", group, 0.0),
        _reduction(records, wanted, (row, single), "cal/nll", group, 0.85),
        _bound(records, wanted, row, "cal/ece15", "mean", group, 0.01),
    ]


def _reduction(records: Records, wanted: Study, pair: tuple[str, str], figure: str, group: str, share: float) -> Target:
    """Return the target that the first row's mean figure is at most `share` of the second's."""
    title = metric_of(figure).title.removesuffix(" (%)")
    text = f"{title} at least {100 * (1 - share):.0f} % below {pair[1]}"
    first, second = (records.by_seed(list_runs_of_row(wanted, row), figure, "mean") for row in pair)
    common = first.keys() & second.keys()
    if not common:
        return Target(group, text)
    ratio = fmean(first[seed] for seed in common) / fmean(second[seed] for seed in common)
    return Target(group, text, f"{100 * (ratio - 1):+.1f} %".replace("-", "−"), len(common), met=ratio <= share)


def _beats(records: Records, wanted: Study, pair: tuple[str, str], group: str) -> Target:
    """Return the target that the first row is better than the second in accuracy, NLL and ECE."""
    text = f"better than {pair[1]} in accuracy, NLL and ECE"
    differences = [subtract_rows(records, wanted, pair, figure, "mean") for figure in BETTER_IN]
    known = [by_figure for by_figure in differences if by_figure is not None]
    if len(known) < len(BETTER_IN):
        return Target(group, text)
    better = [
        by_figure.mean > 0 if metric_of(by_figure.figure).better == "higher" else by_figure.mean < 0
        for by_figure in known
    ]
    shown = ", ".join(f"{name} {by_figure}" for name, by_figure in zip(("accuracy", "NLL", "ECE"), known, strict=True))
    return Target(group, text, shown, len(known[0].values), met=all(better))


def _continual(records: Records, dataset: str) -> Target:
    """Return the target that continual learning reaches the published accuracy."""
    wanted = study("table-continual", StudyOptions(datasets=(dataset,)))
    bound = wanted.paper["structured", wanted.columns[0]].value
    return _bound(records, wanted, "structured", "cl/accuracy", "mean", f"Split-{NAMES[dataset]}", bound)
