"""Progress of anything that may take longer than two seconds: a bar on a terminal, elsewhere a line now and then."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from structured_ensembles.common.processes import rank

SECONDS = 10  # between two lines, where stderr is not a terminal


@contextmanager
def progress(
    description: str, total: int, quiet: bool = False, time_left: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar; yield a function that advances it by one step and takes figures to show: `advance(loss=2.3)`.

    Where stderr is not a terminal, such as a log file, it is a line every ten seconds. quiet: show nothing.
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
    silent = quiet or rank() > 0
    steps, last_line = 0, time.monotonic()
    with Progress(*columns, console=console, disable=silent or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total, figures="")

        def advance(**figures: float | str) -> None:
            nonlocal steps, last_line
            steps += 1
            text = "  ".join(f"{name} {_format(value)}" for name, value in figures.items())
            bar.advance(task)
            if figures:
                bar.update(task, figures=text)
            if not silent and not console.is_terminal and time.monotonic() - last_line > SECONDS:
                last_line = time.monotonic()
                say(f"{description} {steps:,}/{total:,}  {text}".rstrip())

        yield advance


def _format(value: float | str) -> str:
    """Write a float with three decimals, anything else as it is."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def say(text: str, quiet: bool = False) -> None:
    """Write a line, or a table, to stderr, unless it is empty or quiet; of several processes the first one does."""
    if text and not quiet and rank() == 0:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
