"""Stopwatch: the seconds of a run, all its starts together.

A run that is stopped and resumed has been trained by several processes. Each of them may be killed at any moment, so a
thread writes the time to a file of the run's folder every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from structured_ensembles.common.checks import check_number
from structured_ensembles.storage.run_files import damaged_file_error, read_json, write_json

ELAPSED = "elapsed.json"
INTERVAL = 5.0  # seconds between two writes
REMEDY = "delete it: the seconds of earlier starts are then not counted"


class Stopwatch:
    """Seconds since a start, and those of earlier starts."""

    def __init__(self, earlier: float = 0.0) -> None:
        self.earlier, self.start = earlier, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the seconds of all starts together."""
        return self.earlier + time.perf_counter() - self.start


@contextmanager
def run_stopwatch(folder: Path) -> Iterator[Stopwatch]:
    """Run a stopwatch that goes on from where an earlier process in this folder was stopped."""
    watch = Stopwatch(_read_earlier(folder / ELAPSED))
    stopped = Event()

    def save() -> None:
        with suppress(OSError):  # of a full disk or a deleted folder, the run itself will tell
            write_json(folder / ELAPSED, {"seconds": round(watch.seconds, 3)})

    def save_now_and_then() -> None:
        while not stopped.wait(INTERVAL):
            save()

    thread = Thread(target=save_now_and_then, name="stopwatch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        stopped.set()
        thread.join()
        save()


def _read_earlier(path: Path) -> float:
    """Read the seconds of earlier starts; 0 if there were none."""
    if not path.exists():
        return 0.0
    seconds = read_json(path, REMEDY).get("seconds")
    try:
        check_number("seconds", seconds)
        return float(seconds)  # type: ignore[arg-type]
    except (ValueError, OverflowError) as error:
        raise damaged_file_error(path, error, REMEDY) from error
