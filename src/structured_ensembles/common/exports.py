"""What every export of a network that is read at once, and thrown away, can do without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.fx.config

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
