"""Where the jobs of a grid run: one function of (workers, jobs) per backend, each a context that gives a `Pool`.

Jobs go to the backends' own queues, not through `joblib.Parallel`: that gives up the whole grid when one worker
process dies, while here it costs one job. From joblib we take loky, its worker processes.

There is no backend of threads: torch's random state, its default types and what `torch.export` patches belong to the
process, so that jobs in threads would change one another's numbers.

Clusters that we start ourselves listen on the loopback interface only, as they have no authentication: whoever reaches
one runs code. A cluster that the user brings is the user's.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import joblib
import torch
from joblib.externals.loky import BrokenProcessPool, ProcessPoolExecutor

Backend = Literal["loky", "ray", "dask", "sequential"]


@dataclass(frozen=True)
class Pool:
    """Takes calls, `submit(function, *arguments)`, and gives futures.

    room: how many calls it takes at a time; None if it keeps a queue itself.
    remote: calls leave this process, so that arguments and results must be pickled.
    """

    submit: Callable[..., Future[Any]]
    room: int | None
    remote: bool


LOOPBACK = "127.0.0.1"
RESTART = "60s"  # how long a call waits for a dask worker that died before


@contextmanager
def sequential(_workers: int | None, _jobs: int) -> Iterator[Pool]:
    """One call after the other, here."""

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    yield Pool(submit, 1, remote=False)


@contextmanager
def processes(workers: int | None, jobs: int) -> Iterator[Pool]:
    """Processes of this machine, each with its share of the cores and a GPU if there is one; see `environment`."""
    workers = min(workers or default_workers(), jobs)
    lanes = [_Lane(environment(number, workers)) for number in range(workers)]
    free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        lane = free.get()
        try:
            return lane.call(function, *arguments)
        finally:
            free.put(lane)

    executor = ThreadPoolExecutor(workers)  # its threads only wait for their lanes
    kill = True
    try:
        with warnings.catch_warnings():
            # loky replaces a process that has grown by 300 MB between two jobs, and says so: nothing is lost.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor")
            yield Pool(lambda *arguments: executor.submit(call, *arguments), workers, remote=True)
        kill = False
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for lane in lanes:
            lane.close(kill)
        executor.shutdown(wait=True)


class _Lane:
    """One worker process in a pool of its own: loky gives up a whole pool when one of its processes dies."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        self.lock = threading.Lock()
        self.closed = False
        self.pool = self._new_pool()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            with self.lock:
                if not self.closed:
                    self.pool.shutdown(wait=True, kill_workers=True)
                    self.pool = self._new_pool()
            raise

    def close(self, kill: bool) -> None:
        with self.lock:
            self.closed = True
            self.pool.shutdown(wait=True, kill_workers=kill)

    def _new_pool(self) -> ProcessPoolExecutor:
        # The process starts with the first call, and with these variables before any import.
        return ProcessPoolExecutor(1, initializer=_ignore_interrupts, env=self.variables)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the parent decides, and ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def dask(workers: int | None, jobs: int) -> Iterator[Pool]:
    """The current `distributed.Client`, or a local cluster for as long as the grid runs.

    On a cluster of the user's own, threads and GPUs are that cluster's business.
    """
    distributed = _require("distributed", "dask")
    with ExitStack() as stack:

        def executor(**options: Any) -> Executor:
            found: Executor = client.get_executor(pure=False, retries=0, **options)
            stack.callback(found.shutdown, wait=False)  # cancels what has not ended
            return found

        try:
            client = distributed.Client.current()
        except ValueError:
            workers = min(workers or default_workers(), jobs)
            client = stack.enter_context(_local_client(distributed, workers))
            submit = _one_call_each([executor(resources={_place(number): 1}) for number in range(workers)])
        else:
            submit = executor().submit
        yield Pool(submit, workers, remote=True)


def _place(number: int) -> str:
    """A resource of one worker alone: what asks for it goes to that worker, or waits until it has been restarted."""
    return f"place {number}"


def _one_call_each(executors: Sequence[Executor]) -> Callable[..., Future[Any]]:
    """`submit` to whichever has given back its last result.

    dask leaves a result where it was made until it is fetched. If the next call were there by then and killed that
    worker, the finished job would be lost with it. A worker that could not be restarted gets no further call, unless
    it is the last.
    """
    left = set(executors)
    free: queue.SimpleQueue[Executor] = queue.SimpleQueue()
    for executor in executors:
        free.put(executor)

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        executor = free.get()

        def give_back(future: Future[Any]) -> None:
            gone = not future.cancelled() and type(future.exception()).__name__ == "NoValidWorkerError"
            if gone and len(left) > 1:
                left.discard(executor)
            else:
                free.put(executor)

        future = executor.submit(function, *arguments)
        future.add_done_callback(give_back)
        return future

    return submit


@contextmanager
def _local_client(distributed: ModuleType, workers: int) -> Iterator[Any]:
    settings = importlib.import_module("dask").config
    nannies = {
        number: {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "host": LOOPBACK,
                "dashboard_address": f"{LOOPBACK}:0",  # dask has no worker without this server
                "env": environment(number, workers),
                "resources": {_place(number): 1},
                "silence_logs": "CRITICAL",
            },
        }
        for number in range(workers)
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"dashboard": False, "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", "port": 0},
    }
    own = {
        "distributed.scheduler.allowed-failures": 0,  # by default a call that kills its worker gets three more to kill
        "distributed.scheduler.no-workers-timeout": RESTART,
    }
    with (
        settings.set(own),
        distributed.SpecCluster(nannies, scheduler, name="grid", silence_logs="CRITICAL") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def ray(workers: int | None, _jobs: int) -> Iterator[Pool]:
    """The ray that is running, or a local one for as long as the grid runs; each call gets its share of cores, GPUs."""
    package = _require("ray", "ray")
    with ExitStack() as stack:
        if not package.is_initialized():
            _connect_or_start(package)
            stack.callback(package.shutdown)
        resources = package.cluster_resources()
        cores, gpus = int(resources.get("CPU", 1)), resources.get("GPU", 0)
        room = workers or int(gpus) or cores
        options = {"num_cpus": max(1, cores // room), "num_gpus": min(1, gpus / room), "max_retries": 0}

        def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            return package.remote(**options)(function).remote(*arguments).future()

        yield Pool(submit, room, remote=True)


def _connect_or_start(package: ModuleType) -> None:
    """Connect to the cluster that RAY_ADDRESS names or that runs on this machine; else start one on loopback."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    if os.environ.get("RAY_ADDRESS") != "local":
        try:
            package.init(address="auto", **quiet)
            return
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):  # a cluster that the user named, and that is not there
                raise
    # Without an address of its own, ray listens where other machines can reach it.
    package.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)


BACKENDS: dict[Backend, Callable[[int | None, int], AbstractContextManager[Pool]]] = {
    "loky": processes,
    "ray": ray,
    "dask": dask,
    "sequential": sequential,
}


def default_workers() -> int:
    """One per GPU, or one per core."""
    return torch.cuda.device_count() or joblib.cpu_count()


def environment(number: int, workers: int) -> dict[str, str]:
    """The variables that worker `number` of so many starts with: its share of the cores, and one GPU.

    CUDA_VISIBLE_DEVICES rather than an argument `device`: whatever a job and the libraries under it call "cuda" is then
    the worker's own GPU, and none of them opens a context on another. It counts only if set before CUDA starts, which
    holds for variables that a process is born with, and it stays true for all jobs of that worker.
    """
    share = str(max(1, joblib.cpu_count() // workers))
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), share)
    variables["TTY_COMPATIBLE"] = "0"  # bars of several processes would overwrite one another, and the grid's
    if count := torch.cuda.device_count():
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = named.split(",")[:count] if named else [str(device) for device in range(count)]
        variables["CUDA_VISIBLE_DEVICES"] = devices[number % count]
    return variables


def _require(package: str, backend: Backend) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"backend={backend!r} needs the package {package}: pip install structured-ensembles[cluster]"
        ) from error
