"""Threads that decode pictures: all passes over data share them, and they end with the last pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

PREFIX = "structured-ensembles-decoding"  # of the names of the threads
# By number of threads: the pool, and how many passes use it. A pass may end within the garbage collector, which may run
# while the lock is held: hence a lock that the same thread can take twice.
_POOLS: dict[int, tuple[ThreadPoolExecutor, int]] = {}
_LOCK = threading.RLock()


@contextmanager
def decoding_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `count` threads, which all that ask for as many at the same time share."""
    with _LOCK:
        pool, users = _POOLS.get(count) or (ThreadPoolExecutor(count, PREFIX), 0)
        _POOLS[count] = pool, users + 1
    try:
        yield pool
    finally:
        with _LOCK:
            pool, users = _POOLS.pop(count)
            if users > 1:
                _POOLS[count] = pool, users - 1
        if users == 1:
            pool.shutdown(wait=False, cancel_futures=True)  # waiting could be for the thread that collects garbage


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
