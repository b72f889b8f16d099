"""How much memory something takes: parameters are counted by the ensemble itself, bytes here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, batch_size, moved, rows_of
from structured_ensembles.ensemble import Ensemble


def file_bytes(ensemble: Ensemble) -> int:
    """The size of the file that `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        return ensemble.save(Path(folder) / "ensemble.safetensors")


def prediction_bytes(ensemble: Ensemble, inputs: Inputs) -> int:
    """The most bytes that predicting a batch (batch, …) takes at one time, beyond weights and the batch itself."""
    device = device_of(ensemble)
    batch = moved(inputs, device)
    ensemble.logits(rows_of(batch, slice(1)))  # what is set up once, such as a library's workspace, is not the batch's
    return peak_memory(lambda: ensemble.logits(batch, batch_size(batch)), device)


def peak_memory(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes that `run` has allocated in tensors at one time, beyond what was there before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _no_messages():
        recorded.start()
    try:
        run()
    finally:
        with _no_messages():
            recorded.stop()
    events: list[Any] = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@contextmanager
def _no_messages() -> Iterator[None]:
    """The profiler tells the terminal that it starts and stops, past Python, and cannot be asked not to."""
    sys.stderr.flush()
    shown = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
