"""History: the figures of every epoch and member; EpochRow: one epoch of it, which `on_epoch=` receives."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table

Row = dict[str, float | int | None]
COLUMNS = ("epoch", "member", "rate", "loss", "validation_loss", "validation_accuracy", "seconds")


@dataclass(frozen=True)
class EpochRow:
    """The figures of one epoch, for all members that were trained in it; `on_epoch=` receives it.

    epoch: counted from 0. rate: the learning rate of its last step. seconds: for all members together.
    losses, validation_losses, validation_accuracies: by the member's number; None where there is no validation split,
        or no accuracy. A member that has stopped is missing.
    """

    epoch: int
    rate: float
    losses: Mapping[int, float]
    validation_losses: Mapping[int, float | None]
    validation_accuracies: Mapping[int, float | None]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Return the numbers by name, as loggers take them: "rate", "seconds", "loss/0", "validation_accuracy/0", …."""
        by_member = {
            "loss": self.losses,
            "validation_loss": self.validation_losses,
            "validation_accuracy": self.validation_accuracies,
        }
        return {
            "rate": self.rate,
            "seconds": self.seconds,
            **{
                f"{name}/{member}": value
                for name, values in by_member.items()
                for member, value in values.items()
                if value is not None
            },
        }

    def renumbered(self, epoch: int, members: Mapping[int, int]) -> EpochRow:
        """Return a copy for another epoch. members: the new number of every member, by its old one."""
        return EpochRow(
            epoch,
            self.rate,
            {members[member]: value for member, value in self.losses.items()},
            {members[member]: value for member, value in self.validation_losses.items()},
            {members[member]: value for member, value in self.validation_accuracies.items()},
            self.seconds,
        )


OnEpoch = Callable[[EpochRow], object]  # what it returns is ignored


def check_on_epoch(on_epoch: OnEpoch | None) -> None:
    """Raise a TypeError unless `on_epoch` is a function or None."""
    if on_epoch is not None and not callable(on_epoch):
        raise TypeError(f"on_epoch must be a function of an EpochRow, such as print, not {on_epoch!r}")


@dataclass
class History:
    """A row per epoch and member: learning rate, training loss, validation loss and accuracy, seconds of the epoch."""

    rows: list[Row] = field(default_factory=list)
    stopped: dict[int, str] = field(default_factory=dict)  # why a member stopped before the last epoch
    engines: list[str] = field(default_factory=list)  # "graph" or "loop", in the order in which they computed epochs
    fallbacks: list[str] = field(default_factory=list)  # why a slower path was taken

    @classmethod
    def restore(cls, rows: Any, engines: Any, fallbacks: Any) -> History:
        """Build a history from the JSON values of a checkpoint; raise a ValueError that says what is invalid."""
        for row in rows if isinstance(rows, list) else [rows]:
            if not isinstance(row, dict) or row.keys() != set(COLUMNS):
                raise ValueError(f"a row of its history must have {', '.join(COLUMNS)}, not {str(row)[:80]}")
            wrong = [name for name, value in row.items() if not _fits(name, value)]
            if wrong:
                raise ValueError(f"its history has {row[wrong[0]]!r:.80} as {wrong[0]}")
        for texts in (engines, fallbacks):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"its engines and fallbacks must be lists of strings, not {str(texts)[:80]}")
        return cls(rows, engines=engines, fallbacks=fallbacks)

    def __str__(self) -> str:
        members = sorted({int(row["member"] or 0) for row in self.rows})
        header: tuple[str, ...] = ("member", "epochs", "last loss", "best validation loss", "best validation accuracy")
        rows = [self._summary_row(member) for member in members]
        if self.stopped:
            header = (*header, "stopped")
            rows = [(*row, self.stopped.get(member, "")) for member, row in zip(members, rows, strict=True)]
        table = text_table(header, rows)
        engine = f", engine: {self.engine}" if self.engines else ""
        return f"{table}\n{counted(self.epochs, 'epoch')} in {self.seconds:.1f} s{engine}"

    def _summary_row(self, member: int) -> tuple[str, ...]:
        """Summarise a member's epochs: how many, last loss, best validation loss and accuracy."""
        rows = self.of(member)
        losses = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
        accuracies = [row["validation_accuracy"] for row in rows if row["validation_accuracy"] is not None]
        figures = (rows[-1]["loss"], min(losses, default=None), max(accuracies, default=None))
        return str(member), str(len(rows)), *("–" if value is None else f"{value:.4f}" for value in figures)

    @property
    def engine(self) -> str:
        """Return the engine that computed the epochs; "graph, then loop" if it changed on the way."""
        return ", then ".join(self.engines) or "none"

    def add_engine(self, name: str, fallbacks: Sequence[str]) -> None:
        """Record the engine of the next epoch, and the fallbacks so far."""
        if self.engines[-1:] != [name]:
            self.engines.append(name)
        self.fallbacks += [message for message in fallbacks if message not in self.fallbacks]

    @property
    def epochs(self) -> int:
        """Return the number of epochs trained."""
        return 1 + max((int(row["epoch"] or 0) for row in self.rows), default=-1)

    @property
    def seconds(self) -> float:
        """Return the time of all epochs together."""
        return sum(float(row["seconds"] or 0) for row in {row["epoch"]: row for row in self.rows}.values())

    def epoch(self, epoch: int) -> EpochRow:
        """Return the figures of one epoch, counted from 0."""
        rows = {int(row["member"] or 0): row for row in self.rows if row["epoch"] == epoch}
        if not rows:
            raise ValueError(f"epoch must be one of the {self.epochs} that were trained, from 0, not {epoch!r}")
        first = next(iter(rows.values()))
        return EpochRow(
            epoch,
            float(first["rate"] or 0),
            {member: math.nan if row["loss"] is None else row["loss"] for member, row in rows.items()},
            {member: row["validation_loss"] for member, row in rows.items()},
            {member: row["validation_accuracy"] for member, row in rows.items()},
            max(float(row["seconds"] or 0) for row in rows.values()),
        )

    def of(self, member: int) -> list[Row]:
        """Return the rows of a member."""
        return [row for row in self.rows if row["member"] == member]

    def to_csv(self) -> str:
        """Write all rows as CSV with a header."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def _fits(name: str, value: Any) -> bool:
    """Tell whether a value is valid in a column."""
    if name in ("epoch", "member"):
        return type(value) is int and value >= 0
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
