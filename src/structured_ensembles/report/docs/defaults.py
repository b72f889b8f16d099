"""Which arms of the study of defaults are better, judged on the validation split by paired differences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from scipy.special import stdtr, stdtrit

from structured_ensembles.common.markdown import write_table
from structured_ensembles.paper.defaults import CENTRE, COMBINATION, COMBINED, DEEP, FIGURES, row_before
from structured_ensembles.paper.metrics import metric_of
from structured_ensembles.paper.studies import SEEDS, Study
from structured_ensembles.report.docs.differences import Difference, subtract_rows
from structured_ensembles.report.docs.records import NOT_RUN, Records

Verdict = Literal["better", "worse", "not told apart"]
Verdicts = Sequence[Verdict | None]  # one for each of FIGURES; None: not run, or fewer seeds than planned

LIMIT = 2.0  # standard errors
LEVEL = 0.05  # of all comparisons together
TITLES = ("accuracy (points)", "NLL", "ECE, 15 bins (points)")
NAMES = ("accuracy", "NLL", "ECE")


def write_choice_of_defaults(records: Records, wanted: Study) -> str:
    """Write the difference of every arm from the row that it changes, and a sentence on each."""
    lines, sentences, judged = [], [], []
    for pair in list_pairs(wanted.rows):
        differences = [subtract_rows(records, wanted, pair, figure, "mean") for figure in FIGURES]
        seeds = max(0 if difference is None else len(difference.values) for difference in differences)
        lines.append((f"{pair[0]} − {pair[1]}", *map(_format, differences), str(seeds)))
        sentences.append(write_sentence(pair, [judge(difference) for difference in differences], seeds))
        judged += [difference for difference in differences if difference is not None and judge(difference)]
    header = ("on the validation split", *TITLES, "seeds")
    blocks = (
        "Differences, paired over seeds, ± standard error; in brackets the difference in standard errors:",
        write_table(header, lines, range(1, len(header))),
        "\n".join(f"- {sentence}" for sentence in sentences),
        f"Better and worse: by more than {LIMIT:g} standard errors, with all {len(SEEDS)} seeds. "
        f"{write_chance(judged)} The combination was declared before the runs: {', '.join(COMBINED)}.",
    )
    return "\n\n".join(blocks)


def list_pairs(rows: Collection[str]) -> list[tuple[str, str]]:
    """List the rows to compare: each with the row that it changes, and the members with the deep ensemble."""
    pairs = [(row, before) for row in rows if (before := row_before(row)) is not None]
    combined, deep_combined = f"{CENTRE}, {COMBINATION}", f"{DEEP}, {COMBINATION}"
    against_deep = [(CENTRE, DEEP), (combined, DEEP), (combined, deep_combined)]  # the last by the same recipe
    return pairs + [pair for pair in against_deep if {*pair} <= {*rows}]


def write_chance(judged: Sequence[Difference]) -> str:
    """Say how many of the differences would be beyond the limit by chance, how many are, and beyond one for all.

    judged: the differences with all seeds.
    """
    freedom, count, chance = len(SEEDS) - 1, len(judged), chance_beyond_limit()
    text = f"A figure that does not differ at all is as far off in {100 * chance:.0f} of 100 cases"
    if not count:
        return f"{text}: one alone is a lead and no result."
    limit = stdtrit(freedom, 1 - LEVEL / (2 * count))  # Bonferroni's
    beyond = [sum(abs(one.mean) > times * (one.error or 0.0) for one in judged) for times in (LIMIT, limit)]
    return (
        f"{text}: of the {count} compared here about {chance * count:.0f} would be, and {beyond[0]} are. Each of them "
        f"is a lead, to be run again with other seeds; by the limit for {count} comparisons together, {limit:.1f} "
        f"standard errors (Bonferroni, {100 * LEVEL:.0f} %), {beyond[1]} "
        f"{'is a result' if beyond[1] == 1 else 'are results'}."
    )


def chance_beyond_limit() -> float:
    """Return the chance that the seeds put a figure beyond the limit that does not differ at all."""
    return float(2 * stdtr(len(SEEDS) - 1, -LIMIT))


def judge(difference: Difference | None) -> Verdict | None:
    """Judge a difference by two standard errors; None with fewer seeds than planned."""
    if difference is None or difference.error is None or len(difference.values) < len(SEEDS):
        return None
    sign = 1 if metric_of(difference.figure).better == "higher" else -1
    if abs(difference.mean) <= LIMIT * difference.error:
        return "not told apart"
    return "better" if sign * difference.mean > 0 else "worse"


def write_sentence(pair: tuple[str, str], verdicts: Verdicts, seeds: int) -> str:
    """Say in which figures the first row is better than the second, worse, or cannot be told apart from it."""
    text = f"{pair[0]}, against {pair[1]}: "
    if None in verdicts:
        return text + (f"no verdict yet, {seeds} of {len(SEEDS)} seeds." if seeds else f"{NOT_RUN}.")
    better, worse, same = (_figures(verdicts, verdict) for verdict in ("better", "worse", "not told apart"))
    if not better and not worse:
        return f"{text}**not told apart** in accuracy, NLL and ECE."
    parts = [f"**better** in {' and '.join(better)}"] if better else []
    parts += [f"**worse** in {' and '.join(worse)}"] if worse else []
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
