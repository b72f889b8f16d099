"""run_grid(): many jobs in several processes, on one machine or a cluster."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from joblib import wrap_non_picklable_objects

from structured_ensembles.common.checks import check_choice, check_flags, check_whole
from structured_ensembles.common.progress import progress
from structured_ensembles.runs.workers import BACKENDS, Backend, Pool


@dataclass(frozen=True)
class Job:
    """Call of a grid, `function(**arguments)`; a grid resumes if the function does, by its run folder for instance.

    seconds: an estimate of how long it takes; a grid with a time limit does not start what would not end in time.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job.

    state: "left" if the time limit of the grid came first: the job was not started, or was stopped before it was done.
    seconds: the duration of the function; if its worker died, the time since the job was submitted.
    result: the return value of the function.
    error: None, or the exception with the last lines of its traceback.
    """

    name: str
    state: Literal["done", "failed", "left"]
    seconds: float
    result: Any = None
    error: str | None = None


class _TimeIsUpError(Exception):
    """Signal that leaves the pool as an interruption does, so that its workers are stopped."""


def run_grid(
    jobs: Sequence[Job],
    backend: Backend = "loky",
    workers: int | None = None,
    quiet: bool = False,
    *,
    time_limit: float | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run all jobs; the outcomes come in the order of the jobs. A job that fails, or kills its worker, stops no other.

    backend: "loky" (processes of this machine, spread over its GPUs), "sequential", "dask" (the current
        `distributed.Client`, or a local cluster) or "ray" (the one that is running, or a local one). Local clusters
        listen on 127.0.0.1 only. A local dask cluster starts its processes by importing the script again, which
        therefore needs `if __name__ == "__main__":`.
    workers: how many jobs run at a time; by default one per GPU, or one per core if there is none. Each process gets
        cores // workers threads, but no more than this one has (`--threads`, OMP_NUM_THREADS). Another number of
        threads adds up floats in another order: the last digits of a job's numbers may then differ.
    time_limit: seconds after which running jobs are stopped ("sequential" cannot do that). A job whose estimate
        exceeds the time left is passed over for the next one that fits. Jobs not done by then are "left".
    on_outcome: called with the outcome of each job as it ends.

    An interruption stops the workers; finished jobs have written their files, and the same grid resumes from there.
    """
    _check(jobs, backend, workers)
    check_flags(quiet=quiet)
    if not jobs:
        return []
    outcomes: dict[int, Outcome] = {}
    start = time.perf_counter()

    def time_left() -> float | None:
        return None if time_limit is None else max(0.0, time_limit - (time.perf_counter() - start))

    with (
        suppress(_TimeIsUpError),
        BACKENDS[backend](workers, len(jobs)) as pool,
        progress("jobs", len(jobs), quiet, time_left=False) as advance,
    ):
        waiting = list(range(len(jobs)))
        running: dict[Future[Any], tuple[int, float]] = {}
        room = pool.room or len(jobs)
        while True:
            while len(running) < room and (index := _next_job(jobs, waiting, time_left())) is not None:
                waiting.remove(index)
                running[_submit(jobs[index], pool)] = index, time.perf_counter()
            if not running:
                break
            ended = wait(running, time_left(), return_when=FIRST_COMPLETED).done
            if not ended:
                raise _TimeIsUpError
            for future in ended:
                index, began = running.pop(future)
                outcomes[index] = _read_outcome(jobs[index].name, future, time.perf_counter() - began)
                if on_outcome is not None:
                    on_outcome(outcomes[index])
                failed = sum(outcome.state == "failed" for outcome in outcomes.values())
                advance(failed=failed, left=_format_time_left(list(outcomes.values()), len(jobs), room))
    for index, job in enumerate(jobs):
        outcomes.setdefault(index, Outcome(job.name, "left", 0.0))
    return [outcomes[index] for index in range(len(jobs))]


def _next_job(jobs: Sequence[Job], waiting: Sequence[int], seconds: float | None) -> int | None:
    """Return the first of the waiting jobs that would end within so many seconds; None if there is none."""
    return next((index for index in waiting if seconds is None or jobs[index].seconds < seconds), None)


def _check(jobs: Sequence[Job], backend: str, workers: int | None) -> None:
    """Raise a ValueError for an unknown backend, a bad number of workers or repeated names."""
    check_choice("backend", backend, tuple(BACKENDS))
    check_whole("workers", workers, or_none=True)
    names = [job.name for job in jobs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"jobs must have different names, but there are several {', '.join(map(repr, repeated))}")


# Jobs to workers, outcomes back -------------------------------------------------------------------------------------


def _submit(job: Job, pool: Pool) -> Future[Any]:
    """Submit a job to the pool; one that cannot be pickled fails at once."""
    if not pool.remote:
        return pool.submit(_attempt, job.name, lambda: job.function(**job.arguments))
    try:
        call = _pickle((job.function, dict(job.arguments)))
    except Exception as error:
        future: Future[Any] = Future()
        future.set_result(_failure(job.name, 0.0, f"it cannot be sent to a worker: {_format_last_line(error)}"))
        return future
    return pool.submit(_attempt_remotely, job.name, call)


def _attempt(name: str, call: Callable[[], Any]) -> Outcome:
    """Call a job's function and return its outcome, an exception included."""
    start = time.perf_counter()
    try:
        result = call()
    except (Exception, SystemExit) as error:
        return _failure(name, time.perf_counter() - start, _format_error(error))
    return Outcome(name, "done", time.perf_counter() - start, result)


def _attempt_remotely(name: str, call: bytes) -> bytes:
    """Attempt a job in the worker; pickle here, so that a pickling error is this job's failure on every backend."""

    def unpack_and_call() -> Any:
        function, arguments = pickle.loads(call)
        return function(**arguments)

    outcome = _attempt(name, unpack_and_call)
    try:
        return _pickle(outcome)
    except Exception as error:
        return _pickle(_failure(name, outcome.seconds, f"its result cannot be sent back: {_format_last_line(error)}"))


def _read_outcome(name: str, future: Future[Any], seconds: float) -> Outcome:
    """Return the worker's outcome, or a failure if the worker died."""
    try:
        outcome = future.result()
        return pickle.loads(outcome) if isinstance(outcome, bytes) else outcome  # type: ignore[no-any-return]
    except Exception as error:
        return _failure(name, seconds, f"its worker died: {_format_last_line(error)}")


def _pickle(value: Any) -> bytes:
    """Pickle by cloudpickle, so that functions of a script or notebook work too; `pickle.loads` reads it."""
    return pickle.dumps(wrap_non_picklable_objects(value, keep_wrapper=False))


def _failure(name: str, seconds: float, error: str) -> Outcome:
    return Outcome(name, "failed", seconds, error=error)


def _format_error(error: BaseException) -> str:
    """Format the exception with the last four calls of the job."""
    frame = error.__traceback__
    for _ in range(2):  # _attempt, and the call it was given
        frame = frame and frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame, limit=-4)).strip()


def _format_last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _format_time_left(outcomes: Sequence[Outcome], total: int, room: int) -> str:
    """Estimate the time left from the mean over the jobs so far, without jobs that were done before."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds > 1] or [o.seconds for o in outcomes]
    left = sum(seconds) / len(seconds) * (total - len(outcomes)) / min(room, total)
    hours, rest = divmod(round(left), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
