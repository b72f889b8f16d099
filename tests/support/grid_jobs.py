"""Return, fail, die or wait, as jobs of a grid do; in a module of their own, so that workers can unpickle them."""

import os
import sys
import time
from pathlib import Path

import torch

from structured_ensembles.runs.grid import Job


def square(number: int) -> int:
    return number**2


def fail(reason: str) -> None:
    raise ValueError(reason)


def leave() -> None:
    sys.exit("had enough")


def die() -> None:
    os._exit(3)


def rest() -> None:
    time.sleep(0.7)


def edit_and_die(path: Path) -> None:
    path.touch()
    os._exit(3)


def meet(own: Path, other: Path) -> tuple[int, str | None, int]:
    """Wait for a job that runs at the same time; return this one's process id, GPUs and threads."""
    own.touch()
    deadline = time.monotonic() + 30
    while not other.exists():
        assert time.monotonic() < deadline, "the other job never came"
        time.sleep(0.01)
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.get_num_threads()


def meet_and_return_much(own: Path, other: Path) -> bytes:
    meet(own, other)
    return bytes(200_000_000)


def work(folder: Path, name: str, seconds: float) -> str:
    """Write a file after `seconds`, or return at once if it is there, as a finished run does."""
    if (folder / name).exists():
        return "was done"
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    time.sleep(seconds)
    (folder / name).touch()
    return "did it"


def short_and_long_jobs(folder: Path, seconds: float) -> list[Job]:
    jobs = [Job("short", work, {"folder": folder, "name": "short", "seconds": 0})]
    jobs += [Job(f"long{n}", work, {"folder": folder, "name": f"long{n}", "seconds": seconds}) for n in range(3)]
    return jobs


def break_gpu() -> int:
    """Leave CUDA as an illegal memory access does: every further call fails. Returns the number of this process."""

    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = synchronize
    return os.getpid()
