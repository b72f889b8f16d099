"""Threads of the CPU: how many this process can use, and a context that sets their number and restores it.

More threads than cores make a network several times slower, and so do threads on cores that other programs use: after
every operation the fast threads spin until the slow ones arrive. PyTorch takes one thread per physical core, whatever a
container or `taskset` grants. The choice here depends on the machine and on the size of the work, never on how busy the
machine happens to be: the same seed then gives the same numbers.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from structured_ensembles.common.plurals import counted

logger = logging.getLogger(__name__)
_warned = False

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which users choose
SYSTEM = Path("/sys")
OWN_GROUP = Path("/proc/self/cgroup")
# Multiply-adds of a forward pass on one batch, below which threads cost more than they save. ResNet20 has 0.3e9 on 128
# digits of 8×8 pixels, 5.2e9 on 128 images of 32×32.
SMALL_WORK = 1_000_000_000


def count_usable_cores() -> int:
    """Count the physical cores that this process may use: by its affinity and by the limits of its container."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_read(SYSTEM / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list") for number in allowed}
    physical = len(allowed) if None in cores else len(cores)  # two hyperthreads of a core have the same siblings
    return math.ceil(min(physical, read_quota()))


def read_quota() -> float:
    """Read how many CPUs the control group of this process grants (`docker --cpus 2`); infinity without a limit."""
    lines = (_read(OWN_GROUP) or "").splitlines()
    paths = {line.rpartition(":")[2].strip("/") for line in lines} | {""}
    folders = [SYSTEM / "fs/cgroup", SYSTEM / "fs/cgroup/cpu"]
    quotas = [math.inf]
    for folder in {root / path for root in folders for path in paths}:
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")  # version 2
        if quota == "max":  # version 1
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "1"
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas)


def choose_threads(wanted: int | None = None, work: float = math.inf) -> int:
    """Choose a number of threads: the wanted one, the user's by OMP_NUM_THREADS, one for small work, or one per core.

    work: multiply-adds of a forward pass on one batch.
    """
    if wanted is not None:
        return wanted
    if any(os.environ.get(name) for name in VARIABLES):
        return torch.get_num_threads()
    return 1 if work < SMALL_WORK else min(torch.get_num_threads(), count_usable_cores())


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute on so many threads; restore their number at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def explain_slowness(threads: int) -> str:
    """Explain in a sentence why computing on so many threads will be slow; nothing where it should be fast."""
    cores = count_usable_cores()
    advice = "set OMP_NUM_THREADS=1, or --threads 1 of sens, if it is slow"
    if threads > cores:
        return f"{threads} threads are more than the {counted(cores, 'core')} that this process may use: {advice}"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads > 1 and busy > 0.75 * cores:
        return (
            f"other programs keep the machine busy (load {busy:.1f} on {counted(cores, 'core')}), and {threads} "
            f"threads would wait for each other: {advice}"
        )
    return ""


def warn_of_slowness() -> None:
    """Log, once per process, that computing on the CPU will be slow with the threads that torch has."""
    global _warned  # noqa: PLW0603, a user needs to be told once
    sentence = "" if _warned else explain_slowness(torch.get_num_threads())
    if sentence:
        _warned = True
        logger.warning(sentence)


def _read(path: Path) -> str | None:
    """Return the text of a small file; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return None
