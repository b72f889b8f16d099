"""Display: the progress of a training run on the terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from structured_ensembles.training.history import History, Row


class Display:
    """A progress bar on a terminal; a plain line every ten seconds elsewhere; nothing if quiet."""

    def __init__(self, members: int, epochs: int, steps: int, quiet: bool) -> None:
        self.console = Console(stderr=True)
        self.quiet, self.epochs, self.steps, self.members = quiet, epochs, steps, members
        self.live = self.console.is_terminal and not quiet
        self.last_line = time.monotonic()
        columns = (
            TextColumn("train"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.live, transient=True)
        self.job = self.bar.add_task("train", total=epochs * steps, figures="")

    def __enter__(self) -> Display:
        self.bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def resume(self, epochs: int) -> None:
        """Start the bar behind so many epochs, which an earlier call has trained."""
        self.bar.reset(self.job, completed=epochs * self.steps)

    def step(self) -> None:
        """Advance the bar by one step."""
        if self.live:
            self.bar.advance(self.job)

    def epoch(self, epoch: int, history: History, rate: float) -> None:
        """Show the epoch, the learning rate and each member's validation accuracy (or loss)."""
        latest = {row["member"]: row for row in history.rows}
        shown = " ".join(_format_result(latest.get(member)) for member in range(self.members))
        text = f"epoch {epoch + 1}/{self.epochs}  rate {rate:.4f}  members {shown}"
        if self.live:
            self.bar.update(self.job, figures=text)
        elif not self.quiet and (time.monotonic() - self.last_line > 10 or epoch + 1 == self.epochs):
            self.last_line = time.monotonic()
            self.console.print(text, highlight=False)


def _format_result(row: Row | None) -> str:
    """Format a validation accuracy as a percentage; where there is none, the loss of validation, or of training."""
    if row is None:
        return "–"
    accuracy, validation_loss = row["validation_accuracy"], row["validation_loss"]
    if accuracy is not None:
        return f"{100 * accuracy:.1f}%"
    return f"{row['loss'] if validation_loss is None else validation_loss:.3f}"
