"""AccuracyMatrix: the accuracy on every task after learning each task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structured_ensembles.common.tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AccuracyMatrix:
    """Accuracy matrix R: row i holds the test accuracies on the first i + 1 tasks after learning the last of these.

    tasks: their numbers, in the order in which they were learned; by default 0, 1, …
    unaided: accuracy after the last task when the learner has to infer the task of a sample. inferred: how often it
        infers the right task. Both are shares of all test samples.
    """

    rows: tuple[tuple[float, ...], ...]
    unaided: float | None = None
    inferred: float | None = None
    tasks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) != number + 1 for number, row in enumerate(self.rows)):
            raise ValueError(f"rows must be a lower triangle of 1, 2, … accuracies, not of {[*map(len, self.rows)]}")
        if not self.tasks:
            object.__setattr__(self, "tasks", tuple(range(len(self.rows))))
        if len(self.tasks) != len(self.rows) or not all(isinstance(task, int) for task in self.tasks):
            raise ValueError(f"tasks must be the numbers of {len(self.rows)} tasks, not {self.tasks!r:.80}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def values(self) -> Tensor:
        """Return R as float64, shape (tasks, tasks); NaN above the diagonal."""
        full = torch.full((len(self), len(self)), torch.nan, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            full[number, : number + 1] = torch.tensor(row, dtype=torch.float64)
        return full

    @property
    def accuracy(self) -> float:
        """Return the paper's accuracy: the mean of R on and below the diagonal."""
        entries = [value for row in self.rows for value in row]
        return sum(entries) / len(entries)

    @property
    def final_accuracy(self) -> float:
        """Return the mean accuracy over the tasks after learning the last one."""
        return sum(self.rows[-1]) / len(self)

    @property
    def forgetting(self) -> float:
        """Return the loss from a task's best to its final accuracy, averaged over all but the last task."""
        lost = [max(row[task] for row in self.rows[task:-1]) - self.rows[-1][task] for task in range(len(self) - 1)]
        return sum(lost) / len(lost) if lost else 0.0

    @property
    def backward_transfer(self) -> float:
        """Return the mean change of a task's accuracy since it was learned; negative if it is forgotten."""
        changes = [self.rows[-1][task] - self.rows[task][task] for task in range(len(self) - 1)]
        return sum(changes) / len(changes) if changes else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures above by name, with those without task identity where they are known."""
        figures = {
            "accuracy": self.accuracy,
            "final_accuracy": self.final_accuracy,
            "forgetting": self.forgetting,
            "backward_transfer": self.backward_transfer,
        }
        without = {"accuracy_without_identity": self.unaided, "task_inference_accuracy": self.inferred}
        return figures | {name: value for name, value in without.items() if value is not None}

    def __str__(self) -> str:
        figures = [f"{name.replace('_', ' ')} {100 * value:.2f} %" for name, value in self.figures.items()]
        return f"{self.table()}\n{', '.join(figures)}"

    def table(self) -> str:
        """Return R as a text table in per cent, a row per task learned."""
        header = ("after", *(f"task {task}" for task in self.tasks), "mean")
        rows = []
        for number, row in enumerate(self.rows):
            cells = [f"{100 * value:.2f}" for value in row] + [""] * (len(self) - 1 - number)
            rows.append((f"task {self.tasks[number]}", *cells, f"{100 * sum(row) / len(row):.2f}"))
        return text_table(header, rows)

    def figure(self) -> Figure:
        """Draw R as a heat map."""
        from structured_ensembles.continual.figures import draw_accuracy_matrix  # matplotlib takes long to import

        title = f"accuracy {100 * self.accuracy:.2f} %, forgetting {100 * self.forgetting:.2f} %"
        return draw_accuracy_matrix(self.rows, self.tasks, title)

    def to_dict(self) -> dict[str, Any]:
        """Return the matrix as JSON has it."""
        shares = {"unaided": self.unaided, "inferred": self.inferred}
        return {"rows": [list(row) for row in self.rows], **shares, "tasks": list(self.tasks)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> AccuracyMatrix:
        """Rebuild the matrix from `to_dict`, also of a version that did not write the numbers of the tasks."""
        rows = tuple(map(tuple, content["rows"]))
        return cls(rows, content["unaided"], content["inferred"], tuple(content.get("tasks", ())))
