"""A progress bar for anything that may take longer than two seconds; silent when nobody looks at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(description: str, total: int, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Gives a function that advances the bar by one step and may be handed figures to show: `advance(loss=2.3)`."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total, figures="")

        def advance(**figures: float) -> None:
            bar.advance(task)
            if figures:
                bar.update(task, figures="  ".join(f"{name} {value:.3f}" for name, value in figures.items()))

        yield advance
