"""run_grid(): many experiments, in as many processes, on one machine or a cluster."""

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

from structured_ensembles.common.checks import check_choice, check_whole
from structured_ensembles.common.progress import progress
from structured_ensembles.runs.workers import BACKENDS, Backend, Pool


@dataclass(frozen=True)
class Job:
    """One experiment: `function(**arguments)`. A grid resumes if the function does, by its run folder for instance.

    seconds: an estimate of how long it takes; a grid with a time limit does not start what would not end in time.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    state: "left" if the time limit of the grid came first: the job was not started, or was ended before it was done.
    seconds: that the function took; if its worker died, since the job was handed over.
    result: what the function returned.
    error: None, or the exception with the last lines of its traceback.
    """

    name: str
    state: Literal["done", "failed", "left"]
    seconds: float
    result: Any = None
    error: str | None = None


class _TimeIsUpError(Exception):
    """Leaves the pool as an interruption does, so that its workers are ended."""


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
        cores // workers threads. Another number of threads adds up floats in another order: the last digits of a job's
        numbers may then differ.
    time_limit: seconds after which jobs that still run are ended ("sequential" cannot do that). A job whose estimate
        exceeds the time left is passed over for the next one that fits. What is not done by then is "left".
    on_outcome: is told of each job as it ends.

    An interruption ends the workers; jobs that are done have left their files, and the same grid goes on from there.
    """
    _check(jobs, backend, workers)
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
                running[_hand_over(jobs[index], pool)] = index, time.perf_counter()
            if not running:
                break
            ended = wait(running, time_left(), return_when=FIRST_COMPLETED).done
            if not ended:
                raise _TimeIsUpError
            for future in ended:
                index, began = running.pop(future)
                outcomes[index] = _outcome(jobs[index].name, future, time.perf_counter() - began)
                if on_outcome is not None:
                    on_outcome(outcomes[index])
                failed = sum(outcome.state == "failed" for outcome in outcomes.values())
                advance(failed=failed, left=_time_left(list(outcomes.values()), len(jobs), room))
    for index, job in enumerate(jobs):
        outcomes.setdefault(index, Outcome(job.name, "left", 0.0))
    return [outcomes[index] for index in range(len(jobs))]


def _next_job(jobs: Sequence[Job], waiting: Sequence[int], seconds: float | None) -> int | None:
    """Return the first of the waiting jobs that would end within so many seconds; None if there is none."""
    return next((index for index in waiting if seconds is None or jobs[index].seconds < seconds), None)


def _check(jobs: Sequence[Job], backend: str, workers: int | None) -> None:
    check_choice("backend", backend, tuple(BACKENDS))
    check_whole("workers", workers, or_none=True)
    names = [job.name for job in jobs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"jobs must have different names, but there are several {', '.join(map(repr, repeated))}")


# A job's way to its worker and back ---------------------------------------------------------------------------------


def _hand_over(job: Job, pool: Pool) -> Future[Any]:
    if not pool.remote:
        return pool.submit(_attempt, job.name, lambda: job.function(**job.arguments))
    try:
        call = _pickled((job.function, dict(job.arguments)))
    except Exception as error:
        future: Future[Any] = Future()
        future.set_result(_failure(job.name, 0.0, f"it cannot be sent to a worker: {_last_line(error)}"))
        return future
    return pool.submit(_attempt_remotely, job.name, call)


def _attempt(name: str, call: Callable[[], Any]) -> Outcome:
    start = time.perf_counter()
    try:
        result = call()
    except (Exception, SystemExit) as error:
        return _failure(name, time.perf_counter() - start, _short(error))
    return Outcome(name, "done", time.perf_counter() - start, result)


def _attempt_remotely(name: str, call: bytes) -> bytes:
    """In the worker. Pickled by ourselves: then what cannot be pickled is this job's failure, on every backend."""

    def unpack_and_call() -> Any:
        function, arguments = pickle.loads(call)
        return function(**arguments)

    outcome = _attempt(name, unpack_and_call)
    try:
        return _pickled(outcome)
    except Exception as error:
        return _pickled(_failure(name, outcome.seconds, f"its result cannot be sent back: {_last_line(error)}"))


def _outcome(name: str, future: Future[Any], seconds: float) -> Outcome:
    """What the worker says of the job, or what is said of the worker."""
    try:
        found = future.result()
        return pickle.loads(found) if isinstance(found, bytes) else found  # type: ignore[no-any-return]
    except Exception as error:
        return _failure(name, seconds, f"its worker did not survive it: {_last_line(error)}")


def _pickled(value: Any) -> bytes:
    """By cloudpickle, so that functions of a script or notebook travel too; `pickle.loads` reads it."""
    return pickle.dumps(wrap_non_picklable_objects(value, keep_wrapper=False))


def _failure(name: str, seconds: float, error: str) -> Outcome:
    return Outcome(name, "failed", seconds, error=error)


def _short(error: BaseException) -> str:
    """The last four calls of the job's own, and the exception."""
    own = error.__traceback__
    for _ in range(2):  # _attempt, and the call it was given
        own = own and own.tb_next
    return "".join(traceback.format_exception(type(error), error, own, limit=-4)).strip()


def _last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _time_left(outcomes: Sequence[Outcome], total: int, room: int) -> str:
    """From the mean of the jobs so far; those that were done before return at once, and say nothing of the others."""
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds > 1] or [o.seconds for o in outcomes]
    left = sum(seconds) / len(seconds) * (total - len(outcomes)) / min(room, total)
    hours, rest = divmod(round(left), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
