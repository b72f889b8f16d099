"""What became of an attack: the outcomes, how an exception is judged, and the table of counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

Verdict = Literal["clean", "equal", "accepted", "different", "other"]
VERDICTS: tuple[Verdict, ...] = ("clean", "equal", "accepted", "different", "other")
FAILURES = ("different", "other")  # must be zero

SECONDS = 3.0  # of CPU time that one file may cost
MEBIBYTES = 200.0  # of memory that one file may cost, on top of what the process had
NO_MEMORY = re.compile(r"alloc|(out of|enough) memory|MemoryError", re.IGNORECASE)
APOLOGY = re.compile(r"Traceback|traceback|please report|a bug", re.IGNORECASE)  # for what nobody expected


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    clean: an error of the expected kind, with a sentence. equal: the result of the untouched file or run.
    accepted: a forged file, or a text file without a checksum, that says something else and is believed.
    different: another result, silently. other: anything else, such as another exception, a crash, a hang, too much
    memory or time, code that a file has run.
    """

    case: str  # kind/attack/number
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0  # of CPU time
    mebibytes: float = 0.0  # by which the memory in use grew at its peak

    @property
    def kind(self) -> str:
        return self.case.split("/")[0]

    @property
    def attack(self) -> str:
        return self.case.split("/")[1]

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES


class CommandError(ValueError):
    """A command that ended with an error of its own; the message is what it complained of. printed: all the rest."""

    def __init__(self, complaint: str, printed: str = "") -> None:
        super().__init__(complaint)
        self.printed = printed


def judged(error: BaseException) -> tuple[Verdict, str]:
    """Tell whether an exception is a clean error: a ValueError of ours with a sentence, and no failed allocation.

    So is the FloatingPointError by which training ends if forged weights are so extreme that the loss is NaN.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    text = f"{type(error).__module__}.{type(error).__name__}: {error}".replace("builtins.", "")[:300]
    if any(isinstance(own, MemoryError) or NO_MEMORY.search(f"{type(own).__name__} {own}") for own in chain):
        return "other", f"memory: {text}"
    if not isinstance(error, ValueError | FloatingPointError) or isinstance(error, UnicodeError | json.JSONDecodeError):
        return "other", text
    if len(str(error).split()) < 4:
        return "other", f"not a sentence: {text}"
    if isinstance(error, CommandError) and APOLOGY.search(str(error)):
        return "other", text
    return "clean", text


def within_limits(outcome: Outcome) -> Outcome:
    """Turn an outcome that was too expensive into a failure."""
    if outcome.failed or (outcome.seconds <= SECONDS and outcome.mebibytes <= MEBIBYTES):
        return outcome
    cost = f"cost {outcome.seconds:.1f} s, {outcome.mebibytes:.0f} MiB; it was {outcome.verdict}: {outcome.detail}"
    return Outcome(outcome.case, "other", cost, outcome.seconds, outcome.mebibytes)


def chosen(kind: str, only: str) -> bool:
    """Tell whether `--only` means this kind: all of them, those of a pattern such as learner-*, or that of a case."""
    return not only or fnmatch(kind, only.partition("/")[0])


Row = dict[str, int | float]


def counted(outcomes: Iterable[Outcome]) -> dict[str, Row]:
    """Count the verdicts of every kind, with the largest cost of one case."""
    rows: dict[str, Row] = {}
    for outcome in outcomes:
        row = rows.setdefault(outcome.kind, {"cases": 0, **dict.fromkeys(VERDICTS, 0), "seconds": 0.0, "MiB": 0.0})
        row["cases"] += 1
        row[outcome.verdict] += 1
        row["seconds"] = max(row["seconds"], round(outcome.seconds, 3))
        row["MiB"] = max(row["MiB"], round(outcome.mebibytes, 1))
    return rows


def total(rows: Iterable[Row]) -> Row:
    """Add up the counts; the costs are maxima."""
    found: Row = {"cases": 0, **dict.fromkeys(VERDICTS, 0), "seconds": 0.0, "MiB": 0.0}
    for row in rows:
        for name in ("cases", *VERDICTS):
            found[name] += row[name]
        for name in ("seconds", "MiB"):
            found[name] = max(found[name], row[name])
    return found


def examples(outcomes: Sequence[Outcome], most: int = 3) -> list[str]:
    """List failures, at most `most` of the same kind and attack, each with what to give to `--only`."""
    seen: Counter[str] = Counter()
    lines = []
    for outcome in outcomes:
        if outcome.failed:
            seen[f"{outcome.kind}/{outcome.attack}"] += 1
            if seen[f"{outcome.kind}/{outcome.attack}"] <= most:
                lines.append(f"{outcome.case}: {outcome.verdict}: {outcome.detail}")
    return lines
