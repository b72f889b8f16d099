"""History: what happened in every epoch, for every member."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field

Row = dict[str, float | int | None]
COLUMNS = ("epoch", "member", "rate", "loss", "validation_loss", "validation_accuracy", "seconds")


@dataclass
class History:
    """One row per epoch and member: rate, training loss, validation loss and accuracy, seconds for the whole epoch."""

    rows: list[Row] = field(default_factory=list)
    stopped: dict[int, str] = field(default_factory=dict)  # why a member stopped before the last epoch

    @property
    def epochs(self) -> int:
        """How many epochs were trained."""
        return 1 + max((int(row["epoch"] or 0) for row in self.rows), default=-1)

    @property
    def seconds(self) -> float:
        return sum(float(row["seconds"] or 0) for row in {row["epoch"]: row for row in self.rows}.values())

    def of(self, member: int) -> list[Row]:
        return [row for row in self.rows if row["member"] == member]

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()
