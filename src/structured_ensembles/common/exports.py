"""Contexts for exports of a network: one at a time; those read at once without stack traces, without messages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from threading import RLock

import torch.fx.config

SETTING = "do_not_emit_stack_traces"  # unknown to older versions of torch, which export all the same

_lock = RLock()


@contextmanager
def exclusive_export() -> Iterator[None]:
    """Let other threads wait: torch.export patches `nn.Module` and other globals, so that two exports spoil each other.

    Also for what else changes globals for a moment, such as the contexts of this file.
    """
    with _lock:
        yield


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
    """Silence torch.export, which logs tracebacks and prints graphs to stderr where it fails: its error says enough."""
    logger = logging.getLogger("torch")
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
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
