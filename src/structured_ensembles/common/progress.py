"""Progress bars for anything that may take longer than two seconds; none where stderr is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from structured_ensembles.common.processes import rank


@contextmanager
def progress(
    description: str, total: int, quiet: bool = False, time_left: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar; yield a function that advances it by one step and takes figures to show: `advance(loss=2.3)`.

    time_left: whether the bar shows an estimate of the time left, from the steps of the last half minute.
    """
    console = Console(stderr=True)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    ]
    if time_left:
        columns.append(TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=quiet or rank() > 0 or not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(description, total=total, figures="")

        def advance(**figures: float | str) -> None:
            bar.advance(task)
            if figures:
                bar.update(task, figures="  ".join(f"{name} {_format(value)}" for name, value in figures.items()))

        yield advance


def _format(value: float | str) -> str:
    """Write a float with three decimals, anything else as it is."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def say(text: str, quiet: bool = False) -> None:
    """Write a line, or a table, to stderr, unless it is empty or quiet; of several processes the first one does."""
    if text and not quiet and rank() == 0:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
