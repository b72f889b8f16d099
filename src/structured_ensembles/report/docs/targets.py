"""Targets: what the project set out to show, and whether the finished runs show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from structured_ensembles.paper.catalogue import study
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.sections import ABSOLUTE_CHECK
from structured_ensembles.paper.studies import SEEDS, Part, Study
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.report.docs.differences import difference, runs_of_row
from structured_ensembles.report.docs.records import Records, table
from structured_ensembles.report.docs.topics import CENTRES, NOT_RUN

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
HEADER = ("target", "figure", "seeds", "verdict")
SUMMARY_HEADER = ("targets", "met", "not met", "seeds")
BETTER_IN = ("cls/accuracy", "cal/nll", "cal/ece15")


@dataclass(frozen=True)
class Target:
    """Something to be shown. figure: of our runs, as text. met: None as long as no run tells."""

    group: str
    text: str
    figure: str = "–"
    seeds: int = 0
    planned_seeds: int = len(SEEDS)
    met: bool | None = None

    @property
    def line(self) -> tuple[str, str, str, str]:
        verdict = NOT_RUN if self.met is None else "met" if self.met else "**not met**"
        if self.met is not None and self.seeds < self.planned_seeds:
            verdict += " so far"
        return f"{self.group}: {self.text}", self.figure, f"{self.seeds} of {self.planned_seeds}", verdict


def targets(records: Records) -> list[Target]:
    """List every target with the figures that the finished runs have for it."""
    found = [*_main(records), _absolute_check(records)]
    for dataset in ("cifar10", "cifar100"):
        wanted = study("front", Part(datasets=(dataset,)))
        for centre in CENTRES:
            found += _front(records, wanted, dataset, centre)
    return found + [_continual(records, dataset) for dataset in NAMES]


def targets_table(found: Sequence[Target]) -> str:
    """Write targets as a Markdown table; a group of which nothing was run takes one line."""
    lines = []
    for group, own in grouped(found).items():
        if any(target.met is not None for target in own):
            lines += [target.line for target in own]
        else:
            text = f"{len(own)} targets" if len(own) > 1 else own[0].text
            lines.append((f"{group}: {text}", "–", f"0 of {own[0].planned_seeds}", NOT_RUN))
    return table(HEADER, lines, right=(1, 2))


def targets_summary(found: Sequence[Target]) -> str:
    """Write one line for each group of targets of which something was run: how many are met, and which are not."""
    lines = []
    for group, own in grouped(found).items():
        known = [target for target in own if target.met is not None]
        missed = [f"{target.text} ({target.figure})" for target in known if not target.met]
        left = len(own) - len(known)
        missed += [f"{left} not run"] if left else []
        if known:
            met = f"{sum(bool(target.met) for target in known)} of {len(own)}"
            seeds = min(target.seeds for target in known)
            lines.append((group, met, "; ".join(missed) or "–", f"{seeds} of {own[0].planned_seeds}"))
    return table(SUMMARY_HEADER, lines, right=(3,)) if lines else "None of them yet."


def grouped(found: Sequence[Target]) -> dict[str, list[Target]]:
    groups: dict[str, list[Target]] = {}
    for own in found:
        groups.setdefault(own.group, []).append(own)
    return groups


def _main(records: Records) -> list[Target]:
    """CIFAR-10/ResNet20 by the paper's combination rule."""
    part = Part(datasets=("cifar10",), models=("resnet20",))
    rule: Combine = "logits"
    accuracy = study("table-accuracy", part)
    found = []
    for row in ("structured, layer", "structured, network"):
        group = f"CIFAR-10/ResNet20, {row}, paper's rule"
        found += [
            _bound(records, accuracy, row, "cls/accuracy", rule, group, 0.9095),
            _lead(records, accuracy, (row, "single"), rule, group, 0.018),
            _bound(records, accuracy, row, "cal/ece", rule, group, 0.039),
        ]
    return found


def _bound(records: Records, wanted: Study, row: str, figure: str, rule: Combine, group: str, bound: float) -> Target:
    """A figure must reach a bound: from below or above, as the metric says."""
    metric = metric_of(figure)
    higher = metric.better == "higher"
    title = metric.title.removesuffix(" (%)")
    text = f"{title} {'≥' if higher else '≤'} {metric.shown(bound)} %"
    values = list(records.by_seed(runs_of_row(wanted, row), figure, rule).values())
    if not values:
        return Target(group, text)
    mean = fmean(values)
    met = mean >= bound if higher else mean <= bound
    return Target(group, text, f"{metric.shown(mean)} %", len(values), met=met)


def _lead(records: Records, wanted: Study, pair: tuple[str, str], rule: Combine, group: str, points: float) -> Target:
    """The first row must have a share of `points` more accuracy than the second."""
    text = f"accuracy at least {100 * points:.1f} points above {pair[1]}"
    found = difference(records, wanted, pair, "cls/accuracy", rule)
    if found is None:
        return Target(group, text)
    return Target(group, text, str(found), len(found.values), met=found.mean >= points)


def _absolute_check(records: Records) -> Target:
    group, text = "ResNet18 alone, 200 epochs, all images of CIFAR-10", "accuracy ≥ 95.30 %"
    values = records.by_seed([ABSOLUTE_CHECK], "cls/accuracy", "mean")
    if not values:
        return Target(group, text, planned_seeds=1)
    (accuracy,) = values.values()
    return Target(group, text, f"{100 * accuracy:.2f} %", 1, 1, accuracy >= 0.953)


def _front(records: Records, wanted: Study, dataset: str, row: str) -> list[Target]:
    """In the memory of one network: better than that network by so much, and than others of its memory."""
    group = f"Front, {NAMES[dataset]}, four members in the memory of one{', coupled' * row.endswith('coupled')}"
    found = [_lead(records, wanted, (row, "single"), "mean", group, 0.003)]
    for figure, share in (("cal/nll", 0.85), ("cal/nll_t", 0.85), ("cal/ece15", 0.5), ("cal/ece15_t", 0.5)):
        found.append(_reduction(records, wanted, (row, "single"), figure, group, share))
    return found + [_beats(records, wanted, (row, other), group) for other in ("batch-ensemble ×4", "mc-dropout ×4")]


def _reduction(records: Records, wanted: Study, pair: tuple[str, str], figure: str, group: str, share: float) -> Target:
    """The first row's figure must be at most `share` of the second's, in the mean over the seeds of both."""
    title = metric_of(figure).title.removesuffix(" (%)")
    text = f"{title} at least {100 * (1 - share):.0f} % below {pair[1]}"
    first, second = (records.by_seed(runs_of_row(wanted, row), figure, "mean") for row in pair)
    common = first.keys() & second.keys()
    if not common:
        return Target(group, text)
    ratio = fmean(first[seed] for seed in common) / fmean(second[seed] for seed in common)
    return Target(group, text, f"{100 * (ratio - 1):+.1f} %".replace("-", "−"), len(common), met=ratio <= share)


def _beats(records: Records, wanted: Study, pair: tuple[str, str], group: str) -> Target:
    """The first row must be better than the second in accuracy, NLL and ECE."""
    text = f"better than {pair[1]} in accuracy, NLL and ECE"
    found = [difference(records, wanted, pair, figure, "mean") for figure in BETTER_IN]
    known = [own for own in found if own is not None]
    if len(known) < len(BETTER_IN):
        return Target(group, text)
    better = [own.mean > 0 if metric_of(own.figure).better == "higher" else own.mean < 0 for own in known]
    shown = ", ".join(f"{name} {own}" for name, own in zip(("accuracy", "NLL", "ECE"), known, strict=True))
    return Target(group, text, shown, len(known[0].values), met=all(better))


def _continual(records: Records, dataset: str) -> Target:
    wanted = study("table-continual", Part(datasets=(dataset,)))
    bound = wanted.paper["structured", wanted.columns[0]].value
    return _bound(records, wanted, "structured", "cl/accuracy", "mean", f"Split-{NAMES[dataset]}", bound)
