"""A progress bar for anything that may take longer than two seconds; silent when nobody looks at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from structured_ensembles.common.processes import rank


@contextmanager
def progress(
    description: str, total: int, quiet: bool = False, time_left: bool = True
) -> Iterator[Callable[..., None]]:
    """Gives a function that advances the bar by one step and may be handed figures to show: `advance(loss=2.3)`.

    time_left: whether the bar estimates it, from the steps of the last half minute.
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
                bar.update(task, figures="  ".join(f"{name} {_shown(value)}" for name, value in figures.items()))

        yield advance


def _shown(value: float | str) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
