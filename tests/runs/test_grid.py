"""Grids of jobs: order, failures, dying workers and interrupts on every backend."""

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import joblib
import pytest
import torch

from structured_ensembles.common.threads import use_threads
from structured_ensembles.runs.grid import Job, Outcome, _format_time_left, run_grid
from structured_ensembles.runs.workers import Backend, _submit_one_each, worker_environment
from tests.support.grid_jobs import (
    break_gpu,
    die,
    fail,
    leave,
    meet,
    meet_and_return_much,
    short_and_long_jobs,
    square,
)
from tests.support.paths import ROOT

PROCESSES = ("loky", "dask")
BACKENDS = ("sequential", *PROCESSES)


def children() -> set[int]:
    """List the child processes of this one, except for Python's resource tracker."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "resource_tracker" not in command:
            pids.add(int(folder.name))
    return pids


@dataclass(frozen=True)
class Grid:
    backend: str
    jobs: list[Job]
    outcomes: list[Outcome]

    def __getitem__(self, name: str) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.name == name)


@pytest.fixture(scope="module", params=BACKENDS)
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Run one grid with everything that can happen to a job, on each backend, pretending to have 2 cores and 2 GPUs."""
    backend = request.param
    if backend == "dask":
        pytest.importorskip("distributed")
    folder = tmp_path_factory.mktemp("meeting")
    first, second = folder / "one", folder / "two"
    jobs = [
        Job("two", square, {"number": 2}),
        Job("bad", fail, {"reason": "no such thing"}),
        Job("leaves", leave),
        Job("wrong", square, {"size": 3}),
        Job("script", lambda number: number + 1, {"number": 6}),
    ]
    if backend != "sequential":
        jobs += [Job("one", meet, {"own": first, "other": second}), Job("other", meet, {"own": second, "other": first})]
    if backend in PROCESSES:
        jobs += [
            Job("dies", die),
            Job("sends", square, {"number": threading.Lock()}),
            Job("returns", threading.Lock),
        ]
    jobs.append(Job("nine", square, {"number": 9}))
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joblib, "cpu_count", lambda: 2)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setenv("OMP_NUM_THREADS", "2")
        outcomes = run_grid(jobs, backend, workers=2)
    assert children() <= before
    return Grid(backend, jobs, outcomes)


def test_outcomes_are_in_job_order_and_failures_do_not_stop_others(grid: Grid) -> None:
    assert [outcome.name for outcome in grid.outcomes] == [job.name for job in grid.jobs]
    failed = {"bad", "leaves", "wrong", "dies", "sends", "returns"} & {job.name for job in grid.jobs}
    for outcome in grid.outcomes:
        assert outcome.state == ("failed" if outcome.name in failed else "done")
        assert (outcome.error is None) == (outcome.state == "done")
        assert (outcome.result is None) == (outcome.state == "failed")
        assert 0 <= outcome.seconds < 60
    assert [grid[name].result for name in ("two", "script", "nine")] == [4, 7, 81]


def test_outcome_has_the_last_frames_of_the_error(grid: Grid) -> None:
    error = grid["bad"].error
    assert error.endswith("ValueError: no such thing")
    assert "raise ValueError(reason)" in error
    assert "_attempt" not in error
    assert grid["leaves"].error.endswith("SystemExit: had enough")
    assert "unexpected keyword argument 'size'" in grid["wrong"].error


def test_jobs_run_concurrently_with_shared_cores_and_gpus(grid: Grid) -> None:
    if grid.backend == "sequential":
        return
    (process, device, threads), (other_process, other_device, other_threads) = grid["one"].result, grid["other"].result
    assert len({process, other_process, os.getpid()}) == 3
    assert {device, other_device} == {"0", "1"}
    assert threads == other_threads == 1


def test_dying_worker_fails_only_its_own_job(grid: Grid) -> None:
    if grid.backend in PROCESSES:
        error = grid["dies"].error
        assert error.startswith("its worker died:")
        assert {"loky": "EXIT(3)", "dask": "KilledWorker"}[grid.backend] in error


def test_worker_whose_gpu_fails_is_replaced() -> None:
    jobs = [Job("breaks", break_gpu), Job("one", os.getpid), Job("two", os.getpid)]
    broken, one, two = (outcome.result for outcome in run_grid(jobs, "loky", workers=1, quiet=True))
    assert broken != one == two


@pytest.mark.parametrize("backend", PROCESSES)
def test_result_in_transfer_survives_the_next_job(
    backend: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next jobs kill their workers while the large result is still being fetched."""
    if backend == "dask":
        pytest.importorskip("distributed")
    first, second = tmp_path / "one", tmp_path / "two"
    jobs = [
        Job("much", meet_and_return_much, {"own": first, "other": second}),
        Job("little", meet, {"own": second, "other": first}),
        Job("dies", die),
        Job("dies too", die),
    ]
    outcomes = run_grid(jobs, backend, workers=2, quiet=True)  # no line of progress, if it takes ten seconds
    assert [outcome.state for outcome in outcomes] == ["done", "done", "failed", "failed"]
    assert len(outcomes[0].result) == 200_000_000
    assert capfd.readouterr() == ("", "")


def test_dask_workers_get_one_call_at_a_time() -> None:
    class Slow(Executor):
        def submit(self, _function: object, name: str) -> Future[str]:
            self.name = name
            return Future()

    first, second = Slow(), Slow()
    submit = _submit_one_each([first, second])
    a = submit(square, "a")
    b = submit(square, "b")
    assert (first.name, second.name) == ("a", "b")
    b.set_result("done")
    c = submit(square, "c")
    assert (first.name, second.name) == ("a", "c")
    c.set_exception(type("NoValidWorkerError", (Exception,), {})())  # the second worker is gone
    a.set_result("done")
    d = submit(square, "d")
    assert (first.name, second.name) == ("d", "c")
    d.set_exception(
        type("NoValidWorkerError", (Exception,), {})()
    )  # so is the first, which still gets the remaining jobs, to report their failure
    submit(square, "e")
    assert first.name == "e"


def test_lost_dask_worker_fails_one_more_job(tmp_path: Path) -> None:
    """A restarted worker imports the script again, which has a syntax error by then."""
    pytest.importorskip("distributed")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"if pathlib.Path({str(tmp_path / 'edited')!r}).exists(): raise SyntaxError('half a line')\n"
        "from tests.support import grid_jobs\n"
        "from structured_ensembles.runs import workers\n"
        "from structured_ensembles.runs.grid import Job, run_grid\n"
        "if __name__ == '__main__':\n"
        "    workers.RESTART = '3s'\n"
        f"    jobs = [Job('dies', grid_jobs.edit_and_die, {{'path': pathlib.Path({str(tmp_path / 'edited')!r})}})]\n"
        "    jobs += [Job(str(n), grid_jobs.rest, {}) for n in range(6)]\n"
        "    print([outcome.state for outcome in run_grid(jobs, 'dask', workers=2)])\n"
    )
    completed = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True, timeout=100)
    states = ast.literal_eval(completed.stdout)
    assert states[0] == "failed"
    assert sorted(states[1:]) == ["done"] * 5 + ["failed"]


def test_unpicklable_job_or_result_fails_that_job(grid: Grid) -> None:
    if grid.backend in PROCESSES:
        assert grid["sends"].error.startswith("it cannot be sent to a worker: TypeError")
        assert grid["returns"].error.startswith("its result cannot be sent back: TypeError")


def test_workers_share_cores_and_have_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib, "cpu_count", lambda: 7)
    with use_threads(7):
        assert worker_environment(0, 2)["OMP_NUM_THREADS"] == "3"
        assert worker_environment(0, 9)["OMP_NUM_THREADS"] == "1"
    with use_threads(2):  # by the user's choice
        assert [worker_environment(0, workers)["OMP_NUM_THREADS"] for workers in (1, 2, 7)] == ["2", "2", "1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [worker_environment(number, 3)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-77,2")  # of which CUDA found the first two
    assert [worker_environment(number, 3)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["5", "GPU-77", "5"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(0, 3)


def test_current_dask_client_is_used_and_left_open() -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=1, processes=False, threads_per_worker=1, dashboard_address=None) as client:
        here = run_grid([Job("here", os.getpid)], "dask")
        assert here[0].result == os.getpid()
        assert client.submit(square, 4).result() == 16


def test_interrupted_grid_ends_at_once_and_resumes(tmp_path: Path) -> None:
    # Processes that a shell starts in the background ignore SIGINT, and so would all children of these tests.
    script = (
        "import pathlib, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from structured_ensembles.runs.grid import run_grid; from tests.support.grid_jobs import short_and_long_jobs; "
        "run_grid(short_and_long_jobs(pathlib.Path(sys.argv[1]), 100), workers=2)"
    )
    # A new session, and the signal to all of it, as Ctrl-C in a terminal does.
    grid = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not ((tmp_path / "short").exists() and (tmp_path / "long0.pid").exists()):
        assert grid.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    start = time.monotonic()
    os.killpg(grid.pid, signal.SIGINT)
    _, errors = grid.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert grid.returncode == -signal.SIGINT
    # After it, loky's resource tracker, a process of its own, may warn of a folder that it finds already removed.
    removed = r"^.*resource_tracker: .*FileNotFoundError\(2, .*\n +warnings\.warn\(.*\n?"
    assert re.sub(removed, "", errors, flags=re.MULTILINE).rstrip().endswith("KeyboardInterrupt")
    for path in tmp_path.glob("*.pid"):
        assert not Path("/proc", path.read_text()).exists()
    assert not (tmp_path / "long0").exists()

    again = run_grid(short_and_long_jobs(tmp_path, 0), "sequential")
    assert [outcome.result for outcome in again] == ["was done", "did it", "did it", "did it"]


def test_interrupted_sequential_grid_keeps_finished_jobs(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    short, *longer = short_and_long_jobs(tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        run_grid([short, Job("stop", interrupt), *longer], "sequential")
    assert [outcome.result for outcome in run_grid([short, *longer], "sequential")] == ["was done", *["did it"] * 3]


def test_progress_bar_counts_failures_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("bad", fail, {"reason": "no"}), Job("good", square, {"number": 1})]
    run_grid(jobs, "sequential")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    run_grid(jobs, "sequential", quiet=True)
    assert capsys.readouterr() == ("", "")
    run_grid(jobs, "sequential")
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "failed 1  left 0:00:00" in shown


def test_time_left_is_estimated_from_jobs_that_ran() -> None:
    outcomes = [Outcome("a", "done", 0.01), Outcome("b", "done", 3000.0), Outcome("c", "failed", 1000.0)]
    assert _format_time_left(outcomes, 8, 2) == "1:23:20"  # 5 jobs of 2000 s, 2 at a time: 5000 s
    assert _format_time_left(outcomes[:1], 3, 8) == "0:00:00"


@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_missing_backend_package_is_an_error(backend: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"^backend='{backend}' needs the package {package}: pip install structured-ensembles\[cluster\]$"
    with pytest.raises(ModuleNotFoundError, match=message):
        run_grid([Job("a", square, {"number": 1})], backend)


def test_invalid_arguments_are_errors() -> None:
    job = Job("a", square, {"number": 1})
    assert run_grid([]) == []
    with pytest.raises(ValueError, match=r"backend must be one of 'loky'.*not 'slurm'"):
        run_grid([job], "slurm")
    with pytest.raises(ValueError, match=r"backend must be one of .*not 'threading'"):  # jobs share random states
        run_grid([job], "threading")
    with pytest.raises(ValueError, match="workers must be a whole number of at least 1, or None, not 0"):
        run_grid([job], workers=0)
    with pytest.raises(ValueError, match="different names, but there are several 'a'"):
        run_grid([job, job])
