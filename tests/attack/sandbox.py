"""Forked processes in which attacks happen: a crash, a hang or a memory limit ends one of them, not the harness.

The process that forks has imported everything and computed nothing, so that a child starts in milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .count import Outcome, within_limits

HANG = 30  # seconds of wall-clock time after which a case counts as hanging
ADDRESS_SPACE = 1 << 30  # bytes that a case may ask for, used or not
MISTAKE = 99  # exit code of a child in which the harness itself failed
STATUS = Path("/proc/self/status")


def in_child(work: Callable[[], Any], seconds: int = 300) -> tuple[int, Any]:
    """Call `work` in a forked process; returns its wait status and what it returned, as JSON has it."""

    def answer(pipe: int) -> None:
        signal.alarm(seconds)
        with os.fdopen(pipe, "wb") as file:
            file.write(json.dumps(work()).encode())

    status, written = _forked(answer, failure=1)
    return status, json.loads(written) if written else None


def _forked(work: Callable[[int], None], failure: int) -> tuple[int, bytes]:
    """Let a forked process write to a pipe; returns its wait status and what it wrote. failure: its exit code then."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = failure
        try:
            work(writing)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    return os.waitpid(child, 0)[1], written


def run_cases(cases: Sequence[str], run: Callable[[str], tuple[str, str]]) -> list[Outcome]:
    """Run all cases, each within the limits; a child that dies takes one case with it, and the next child goes on."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        left = cases[len(outcomes) :]
        status, lines = _run_some(left, run)
        outcomes += [within_limits(Outcome(**json.loads(line))) for line in lines]
        if len(lines) < len(left):
            outcomes.append(Outcome(left[len(lines)], "other", _death(status)))
    return outcomes


def _run_some(cases: Sequence[str], run: Callable[[str], tuple[str, str]]) -> tuple[int, list[str]]:
    """Run cases in one child until it ends; returns its wait status and a line of JSON for every finished case."""
    status, written = _forked(lambda pipe: _run_here(cases, run, pipe), failure=MISTAKE)
    lines = written.decode().splitlines()
    if os.waitstatus_to_exitcode(status) == MISTAKE:
        raise RuntimeError(f"the harness itself failed in {cases[len(lines)]}")
    return status, lines


def _run_here(cases: Sequence[str], run: Callable[[str], tuple[str, str]], writing: int) -> None:
    warnings.simplefilter("ignore")
    gc.freeze()
    limit = int(_status("VmSize") * 1024) + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with os.fdopen(writing, "w", buffering=1) as pipe:
        for case in cases:
            signal.alarm(HANG)
            pipe.write(json.dumps(asdict(_measured(case, run))) + "\n")


def _measured(case: str, run: Callable[[str], tuple[str, str]]) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _status("VmRSS"), time.process_time()
    verdict, detail = run(case)
    seconds, peak = time.process_time() - start, _status("VmHWM")
    return Outcome(case, verdict, detail, seconds, max(0.0, (peak - before) / 1024))  # type: ignore[arg-type]


def _status(name: str) -> float:
    """Of this process, in KiB."""
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return float(found[1])


def _death(status: int) -> str:
    number = os.waitstatus_to_exitcode(status)
    if number == -signal.SIGALRM:
        return f"hang: more than {HANG} s"
    return f"crash: the process ended with {number}"
