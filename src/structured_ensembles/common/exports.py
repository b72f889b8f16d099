"""Contexts for exports of a network that are read at once and thrown away: without stack traces, without messages.

All of them, and `torch.export` itself, change the state of the whole process. So threads export one after the other:
each export holds `EXPORTING`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from threading import RLock

import torch.fx.config

EXPORTING = RLock()  # held by the thread that exports

SETTING = "do_not_emit_stack_traces"  # unknown to older versions of torch, which export all the same


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Let exports not note from which lines of code each operation comes: a quarter of their time, read by nobody."""
    config = torch.fx.config
    before = getattr(config, SETTING, None)
    if before is None:
        yield
        return
    setattr(config, SETTING, True)
    try:
        yield
    finally:
        setattr(config, SETTING, before)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence torch.export, which logs tracebacks and prints graphs to stderr where it fails: its error says enough.

    One thread at a time: others would restore the silence of this one.
    """
    logger = logging.getLogger("torch")
    with EXPORTING:
        before = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            with redirect_stderr(StringIO()):
                yield
        finally:
            logger.setLevel(before)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Let Python not look for garbage for some seconds: exports make objects by the million, few of them garbage.

    The search was a fifth of the time of a trace; what was left in cycles takes some tens of megabytes until the end.
    """
    if not gc.isenabled():  # by the user, or by a trace in another thread, which turns it on again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
