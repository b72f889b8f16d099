"""What runs mean, in three sentences with their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from structured_ensembles.common.plurals import counted
from structured_ensembles.continual.results import rebuild_capacity, rebuild_memory
from structured_ensembles.runs.finished import Finished

Labelled = Mapping[str, Sequence[Finished]]
Figure = Callable[[Sequence[Finished]], str | None]
MOST_COMPARED = 3  # other methods in a sentence


def is_continual_run(run: Finished) -> bool:
    """Tell whether a run learned task after task."""
    return "tasks" in run.config


def choose_subject(runs: Labelled) -> str:
    """Choose the label that a page is about: the structured ensemble, or else the best by its first known figure."""
    for label, seed_runs in runs.items():
        if seed_runs[0].config["method"] == "structured":
            return label
    for name, sign in (("cal/nll", -1), ("reg/rmse", -1), ("cl/accuracy", 1)):
        known = {label: value for label, seed_runs in runs.items() if (value := mean_of(seed_runs, name)) is not None}
        if known:
            return max(known, key=lambda label: sign * known[label])
    return next(iter(runs))


def summarise(setup: str, runs: Labelled) -> list[str]:
    """Write three sentences on the runs of one data set and network, by label; one run per seed."""
    subject = choose_subject(runs)
    others = _choose_others(subject, runs)
    first = runs[subject][0]
    if is_continual_run(first):
        sentences = _summarise_continual(setup, subject, others, runs)
    elif mean_of(runs[subject], "reg/rmse") is not None:
        sentences = _summarise_regression(setup, subject, others, runs)
    else:
        sentences = _summarise_classification(setup, subject, others, runs)
    return [sentence for sentence in sentences if sentence]


def mean_of(runs: Sequence[Finished], name: str) -> float | None:
    """Average a figure over the seeds that have it; None if none has, or a value is not finite."""
    values = [run.figures[name] for run in runs if name in run.figures]
    mean = fmean(values) if values else math.nan
    return mean if math.isfinite(mean) else None


def _choose_others(subject: str, runs: Labelled) -> list[str]:
    """Choose what to compare with: one network, the deep ensemble or a naive learner, then the most accurate."""
    order = {"single": 0, "deep": 1, "naive": 0}

    def rank(label: str) -> tuple[int, float]:
        accuracy = mean_of(runs[label], "cl/accuracy" if is_continual_run(runs[label][0]) else "cls/accuracy")
        return order.get(runs[label][0].config["method"], 2), -(accuracy or 0.0)

    return sorted((label for label in runs if label != subject), key=rank)[:MOST_COMPARED]


def _summarise_classification(setup: str, subject: str, others: Sequence[str], runs: Labelled) -> list[str]:
    subject_runs = runs[subject]
    right = _percent(subject_runs, "cls/accuracy")
    sentences = []
    if right is not None:
        members = mean_of(subject_runs, "size/members")
        number = "" if members is None else f" ({counted(round(members), 'member')}{_memory(subject_runs)})"
        compared = _compare(others, runs, _right_and_memory)
        sentences.append(f"On {setup}, {subject}{number} is right on {right} of the test samples{compared}.")
    before, after = _percent(subject_runs, "cal/ece"), _percent(subject_runs, "cal/ece_t")
    if before is not None:
        tempered = "" if after is None else f", {after} after a temperature"
        nll = mean_of(subject_runs, "cal/nll")
        likelihood = (
            ""
            if nll is None
            else f"; its NLL is {nll:.4f}"
            + _compare(
                others,
                runs,
                lambda of: None if (value := mean_of(of, "cal/nll")) is None else f"{value:.4f}",
                ", that of ",
            )
        )
        sentences.append(f"Its confidence and its accuracy are {before} apart on average (ECE){tempered}{likelihood}.")
    kept, kept_right = mean_of(subject_runs, "unc/kept"), _percent(subject_runs, "unc/kept_accuracy")
    if kept is not None and kept_right is not None:
        coverage, size = _percent(subject_runs, "conf/coverage"), mean_of(subject_runs, "conf/size")
        sets = (
            ""
            if coverage is None or size is None
            else (f"; its prediction sets hold the truth for {coverage} of them with {size:.2f} classes on average")
        )
        sentences.append(
            f"It discards the {100 * (1 - kept):.2f} % of samples that it is least sure of, and is right on "
            f"{kept_right} of the rest{sets}."
        )
    elif (auroc := _percent(subject_runs, "unc/auroc")) is not None:
        sentences.append(
            f"Of a right and a wrong prediction, the wrong one has the higher entropy in {auroc} of all pairs."
        )
    return sentences


def _summarise_regression(setup: str, subject: str, others: Sequence[str], runs: Labelled) -> list[str]:
    subject_runs = runs[subject]

    def error(of: Sequence[Finished]) -> str | None:
        value = mean_of(of, "reg/rmse")
        return None if value is None else f"{value:.4f}"

    covered, width = _percent(subject_runs, "conf/coverage"), mean_of(subject_runs, "conf/width")
    likelihood, member_error = mean_of(subject_runs, "reg/nll"), mean_of(subject_runs, "reg/member_rmse")
    return [
        f"On {setup}, {subject} has a root mean squared error of {error(subject_runs)}{_memory(subject_runs, ' with ')}"
        f"{_compare(others, runs, error, '; that of ')}.",
        "" if member_error is None else f"Its members alone have {member_error:.4f} on average.",
        (
            f"Its conformal intervals hold the truth for {covered} of the test samples, {width:.4f} wide on average."
            if covered is not None and width is not None
            else ""
            if likelihood is None
            else f"Its NLL is {likelihood:.4f}."
        ),
    ]


def _summarise_continual(setup: str, subject: str, others: Sequence[str], runs: Labelled) -> list[str]:
    subject_runs = runs[subject]
    result = subject_runs[0].result
    memory, capacity = rebuild_memory(result), rebuild_capacity(result)
    free = ""
    if capacity is not None and (total := sum(capacity.sizes.values())):
        free = f"; {100 * sum(capacity.free.values()) / total:.1f} % of its neurons are still free"

    def accuracy(of: Sequence[Finished]) -> str | None:
        return _percent(of, "cl/accuracy")

    def forgetting(of: Sequence[Finished]) -> str | None:
        lost = mean_of(of, "cl/forgetting")
        return None if lost is None else f"{100 * lost:.2f} points"

    tasks = len(result["matrix"]["rows"])
    return [
        f"On {setup}, {subject} has an accuracy of {accuracy(subject_runs)} over {counted(tasks, 'task')}"
        f"{_compare(others, runs, accuracy)}.",
        f"It forgets {forgetting(subject_runs)} of accuracy until the end{_compare(others, runs, forgetting)}.",
        f"It stores {memory.task_bytes:,.0f} bytes besides one backbone of {memory.backbone:,} parameters and the "
        f"heads{free}.",
    ]


def _compare(others: Sequence[str], runs: Labelled, figure: Figure, begin: str = "; ") -> str:
    """Append the figure of other methods, where known."""
    known = [(label, value) for label in others if (value := figure(runs[label])) is not None]
    return begin + ", ".join(f"{label} {value}" for label, value in known) if known else ""


def _percent(runs: Sequence[Finished], name: str) -> str | None:
    value = mean_of(runs, name)
    return None if value is None else f"{100 * value:.2f} %"


def _right_and_memory(runs: Sequence[Finished]) -> str | None:
    """Say the accuracy, and the memory in brackets where it is known."""
    right, overhead = _percent(runs, "cls/accuracy"), mean_of(runs, "size/overhead")
    return right if right is None or overhead is None else f"{right} ({overhead:.2f} times the parameters)"


def _memory(runs: Sequence[Finished], begin: str = ", ") -> str:
    """Say the memory in networks, where known."""
    overhead = mean_of(runs, "size/overhead")
    return "" if overhead is None else f"{begin}{overhead:.2f} times the parameters of one network"
