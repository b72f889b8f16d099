"""Backends of a grid: one context manager of (workers, jobs) per backend, each of which yields a `Pool`.

Jobs go to the backends' own queues, not through `joblib.Parallel`: that gives up the whole grid when one worker
process dies, while here only one job fails. From joblib we take loky, its worker processes.

There is no thread backend: torch's random state, its default dtype and what `torch.export` patches belong to the
process, so that jobs in threads would change one another's numbers.

Clusters that we start listen on the loopback interface only, as they have no authentication: whoever reaches one can
run code. The security of a user's cluster is up to the user.
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
    """Pool of workers that takes calls, `submit(function, *arguments)`, and returns futures.

    room: how many calls it takes at a time; None if it has a queue itself.
    remote: calls leave this process, so that arguments and results must be pickled.
    """

    submit: Callable[..., Future[Any]]
    room: int | None
    remote: bool


LOOPBACK = "127.0.0.1"
RESTART = "60s"  # how long a call waits for a dask worker that died before


@contextmanager
def sequential(_workers: int | None, _jobs: int) -> Iterator[Pool]:
    """Yield a pool that runs one call after the other in this process."""

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    yield Pool(submit, 1, remote=False)


@contextmanager
def processes(workers: int | None, jobs: int) -> Iterator[Pool]:
    """Yield a pool of processes, each with its share of the cores and a GPU if there is one."""
    workers = min(workers or count_default_workers(), jobs)
    pool_workers = [_Worker(worker_environment(number, workers)) for number in range(workers)]
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in pool_workers:
        free.put(worker)

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        worker = free.get()
        try:
            return worker.call(function, *arguments)
        finally:
            free.put(worker)

    executor = ThreadPoolExecutor(workers)  # its threads only wait for worker processes
    kill = True
    try:
        with warnings.catch_warnings():
            # loky warns when it replaces a process that has grown by 300 MB between two jobs: nothing is lost.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor")
            yield Pool(lambda *arguments: executor.submit(call, *arguments), workers, remote=True)
        kill = False
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in pool_workers:
            worker.close(kill)
        executor.shutdown(wait=True)


class _Worker:
    """Worker process in a pool of its own, because loky gives up a whole pool when one of its processes dies."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        self.lock = threading.Lock()
        self.closed = False
        self.pool = self._new_pool()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process; replace the process if it dies, or if its GPU no longer works."""
        try:
            result, usable = self.pool.submit(_call_and_check, function, *arguments).result()
        except BrokenProcessPool:
            self._replace()
            raise
        if not usable:
            self._replace()
        return result

    def _replace(self) -> None:
        """Stop the process and start another with the next call."""
        with self.lock:
            if not self.closed:
                self.pool.shutdown(wait=True, kill_workers=True)
                self.pool = self._new_pool()

    def close(self, kill: bool) -> None:
        """Stop the process, after its call or at once."""
        with self.lock:
            self.closed = True
            self.pool.shutdown(wait=True, kill_workers=kill)

    def _new_pool(self) -> ProcessPoolExecutor:
        # The process starts with the first call, and with these variables before any import.
        return ProcessPoolExecutor(1, initializer=_ignore_interrupts, env=self.variables)


def _call_and_check(function: Callable[..., Any], *arguments: Any) -> tuple[Any, bool]:
    """Call a function; returns its result, and whether the process can use its GPU for the next call."""
    return function(*arguments), _gpu_works()


def _gpu_works() -> bool:
    """Tell whether CUDA still works in this process: after an illegal memory access every further call fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the parent stops its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def dask(workers: int | None, jobs: int) -> Iterator[Pool]:
    """Yield a pool on the current `distributed.Client`, or on a local cluster that ends with the grid.

    On a user's cluster, threads and GPUs are the user's to set.
    """
    distributed = _require("distributed", "dask")
    with ExitStack() as stack:

        def executor(**options: Any) -> Executor:
            opened: Executor = client.get_executor(pure=False, retries=0, **options)
            stack.callback(opened.shutdown, wait=False)  # cancels unfinished calls
            return opened

        try:
            client = distributed.Client.current()
        except ValueError:
            workers = min(workers or count_default_workers(), jobs)
            client = stack.enter_context(_local_client(distributed, workers))
            submit = _submit_one_each([executor(resources={_worker_resource(number): 1}) for number in range(workers)])
        else:
            submit = executor().submit
        yield Pool(submit, workers, remote=True)


def _worker_resource(number: int) -> str:
    """Name a resource that only one worker has: calls that ask for it wait for that worker, also while it restarts."""
    return f"place {number}"


def _submit_one_each(executors: Sequence[Executor]) -> Callable[..., Future[Any]]:
    """Return a `submit` that uses an executor whose last result has been fetched.

    dask leaves a result on its worker until it is fetched. A next call that killed the worker before would lose the
    finished job too. A worker that could not be restarted gets no further call, unless it is the last.
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
    """Start a local dask cluster on the loopback interface and yield its client."""
    settings = importlib.import_module("dask").config
    nannies = {
        number: {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "host": LOOPBACK,
                "dashboard_address": f"{LOOPBACK}:0",  # dask workers always have this server
                "env": worker_environment(number, workers),
                "resources": {_worker_resource(number): 1},
                "silence_logs": "CRITICAL",
            },
        }
        for number in range(workers)
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"dashboard": False, "host": LOOPBACK, "dashboard_address": f"{LOOPBACK}:0", "port": 0},
    }
    options = {
        "distributed.scheduler.allowed-failures": 0,  # by default a call that kills its worker gets three more to kill
        "distributed.scheduler.no-workers-timeout": RESTART,
    }
    with (
        settings.set(options),
        distributed.SpecCluster(nannies, scheduler, name="grid", silence_logs="CRITICAL") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def ray(workers: int | None, _jobs: int) -> Iterator[Pool]:
    """Yield a pool on the running ray, or on a local one that ends with the grid; calls share cores and GPUs."""
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
            if os.environ.get("RAY_ADDRESS"):  # the cluster that the user named is not there
                raise
    # Without a node address, ray listens where other machines can reach it.
    package.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)


BACKENDS: dict[Backend, Callable[[int | None, int], AbstractContextManager[Pool]]] = {
    "loky": processes,
    "ray": ray,
    "dask": dask,
    "sequential": sequential,
}


def count_default_workers() -> int:
    """Return one worker per GPU, or one per core without GPUs."""
    return torch.cuda.device_count() or joblib.cpu_count()


def worker_environment(number: int, workers: int) -> dict[str, str]:
    """Return the environment variables of worker `number`: its share of the cores, and one GPU.

    It gets no more threads than this process has, which are those of `--threads` or OMP_NUM_THREADS where a user chose.

    CUDA_VISIBLE_DEVICES rather than an argument `device`: whatever a job and the libraries under it call "cuda" is then
    the worker's GPU, and none of them opens a context on another. It must be set before CUDA starts, which holds for
    variables that a process starts with, for all jobs of that worker.
    """
    share = str(max(1, min(joblib.cpu_count() // workers, torch.get_num_threads())))
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), share)
    variables["TTY_COMPATIBLE"] = "0"  # progress bars of several processes would overwrite the grid's
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",")[:count] if visible else [str(device) for device in range(count)]
        variables["CUDA_VISIBLE_DEVICES"] = devices[number % count]
    return variables


def _require(package: str, backend: Backend) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"backend={backend!r} needs the package {package}: pip install structured-ensembles[cluster]"
        ) from error
