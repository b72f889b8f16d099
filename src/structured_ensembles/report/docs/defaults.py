"""Which arms of the study of defaults win, judged on the validation split by paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from scipy.special import stdtr

from structured_ensembles.paper.defaults import CENTRE, COMBINATION, COMBINED, DEEP, FIGURES, row_before
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import SEEDS, Study
from structured_ensembles.report.docs.differences import Difference, subtract_rows
from structured_ensembles.report.docs.records import NOT_RUN, Records, write_table

Verdict = Literal["better", "worse", "not told apart"]
Verdicts = Sequence[Verdict | None]  # one for each of FIGURES; None: not run, or fewer seeds than planned

LIMIT = 2.0  # standard errors
TITLES = ("accuracy (points)", "NLL", "ECE, 15 bins (points)")
NAMES = ("accuracy", "NLL", "ECE")


def write_choice_of_defaults(records: Records, wanted: Study) -> str:
    """Write the difference of every arm from the row that it changes, and a sentence on each."""
    pairs = [(row, before) for row in wanted.rows if (before := row_before(row)) is not None]
    pairs += [(row, DEEP) for row in (CENTRE, f"{CENTRE}, {COMBINATION}") if {row, DEEP} <= set(wanted.rows)]
    lines, sentences = [], []
    for pair in pairs:
        differences = [subtract_rows(records, wanted, pair, figure, "mean") for figure in FIGURES]
        seeds = max(0 if difference is None else len(difference.values) for difference in differences)
        lines.append((f"{pair[0]} − {pair[1]}", *map(_format, differences), str(seeds)))
        sentences.append(write_sentence(pair, [judge(difference) for difference in differences], seeds))
    header = ("on the validation split", *TITLES, "seeds")
    chance = 2 * stdtr(len(SEEDS) - 1, -LIMIT)
    blocks = (
        "Differences, paired over seeds, ± standard error; in brackets the difference in standard errors:",
        write_table(header, lines, range(1, len(header))),
        "\n".join(f"- {sentence}" for sentence in sentences),
        f"Won and lost: by more than {LIMIT:g} standard errors, with all {len(SEEDS)} seeds. A figure that does not "
        f"differ at all is as far off in {100 * chance:.0f} of 100 cases, so that an arm that wins in one figure only "
        f"is a lead. The combination was declared before the runs: {', '.join(COMBINED)}.",
    )
    return "\n\n".join(blocks)


def judge(difference: Difference | None) -> Verdict | None:
    """Judge a difference by two standard errors; None with fewer seeds than planned."""
    if difference is None or difference.error is None or len(difference.values) < len(SEEDS):
        return None
    sign = 1 if metric_of(difference.figure).better == "higher" else -1
    if abs(difference.mean) <= LIMIT * difference.error:
        return "not told apart"
    return "better" if sign * difference.mean > 0 else "worse"


def write_sentence(pair: tuple[str, str], verdicts: Verdicts, seeds: int) -> str:
    """Say whether the first row won against the second, lost, both in some figures, or cannot be told apart."""
    text = f"{pair[0]}, against {pair[1]}: "
    if None in verdicts:
        return text + (f"no verdict yet, {seeds} of {len(SEEDS)} seeds." if seeds else f"{NOT_RUN}.")
    better, worse, same = (_figures(verdicts, verdict) for verdict in ("better", "worse", "not told apart"))
    if not better and not worse:
        return f"{text}**not told apart** in accuracy, NLL and ECE."
    parts = [f"**won** in {' and '.join(better)}"] if better else []
    parts += [f"**lost** in {' and '.join(worse)}"] if worse else []
    parts += [f"not told apart in {' and '.join(same)}"] if same else []
    return f"{text}{', '.join(parts)}."


def _figures(verdicts: Verdicts, wanted: str) -> list[str]:
    """Name the figures with this verdict."""
    return [name for name, verdict in zip(NAMES, verdicts, strict=True) if verdict == wanted]


def _format(difference: Difference | None) -> str:
    """Format a difference, and its ratio to the standard error where there is one."""
    if difference is None:
        return NOT_RUN
    error = difference.error
    return difference.number + (f" ({difference.mean / error:+.1f})".replace("-", "−") if error else "")
