"""Start Python programs as forks of one process that has imported torch and this package already.

A new interpreter needs two seconds of CPU for these imports, a fork some milliseconds. The server does nothing but
import, so that a fork is like a new interpreter: no threads, no tensors, its own signals and its own end.

The protocol: a line of JSON to the server's standard input, a line of JSON back.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

SERVER = "from tests.support.fork_server import serve; serve()"


@dataclass(frozen=True)
class Program:
    """A running program; its output is in the files `stdout` and `stderr`."""

    server: "ForkServer"
    pid: int
    stdout: Path
    stderr: Path

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        return self.server.ask({"poll": self.pid})

    def wait(self, timeout: float = 120) -> int:
        """Wait for the end and return the exit code."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"still running after {timeout} s: {self.stderr.read_text()}"
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The side of the tests: starts the server, sends requests."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Program:
        """Run a file as the main program; what it prints goes to files beside it, which a later program overwrites."""
        name = f"{script.stem}-{(environment or {}).get('RANK', 0)}"
        stdout, stderr = (script.with_name(f"{name}.{stream}") for stream in ("stdout", "stderr"))
        words = [str(script), *arguments]
        pid = self.ask({"run": words, "env": environment or {}, "stdout": str(stdout), "stderr": str(stderr)})
        return Program(self, pid, stdout, stderr)


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start a server and end it, and with it the pipes that its programs could be asked for."""
    server = ForkServer()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def serve() -> None:
    """Answer requests until the input ends; a fork returns after running its program, so that Python ends as usual."""
    import torch
    import torch._dynamo  # imported by the first optimizer

    import tests.support.continual_cases
    import tests.support.mesh_work
    import tests.support.networks
    import tests.support.real_data  # noqa: F401 - all of these are what the programs import

    torch.set_num_threads(1)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    exit_codes: dict[int, int] = {}
    answer: int | None
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            if request["poll"] not in exit_codes:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                if pid:
                    exit_codes[pid] = os.waitstatus_to_exitcode(status)
            answer = exit_codes.get(request["poll"])
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _run(request)
                return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(request: Mapping[str, Any]) -> None:
    """Become the program: its input, output, environment and arguments; then run it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request["env"])
    sys.argv = request["run"]
    runpy.run_path(sys.argv[0], run_name="__main__")
